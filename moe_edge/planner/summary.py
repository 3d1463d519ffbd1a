"""A plan as it is printed and written: what was chosen, what loses, what is refused."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.budget import parse_budget
from moe_edge.planner.candidates import Placed, parts_of
from moe_edge.planner.choose import Judged, loses_by
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.quality import Refused
from moe_edge.planner.search import Found
from moe_edge.planner.verify import errors_of, was_best
from moe_edge.planner.written import PROMPT, gin_text, readme
from moe_edge.training.generators import FAMILIES

SHOWN = 8  # alternatives


class Plan(NamedTuple):
    """A plan, as it is printed and written."""

    summary: dict[str, Any]
    gin: str
    readme: str
    files: Mapping[str, Callable[[Path], None]]
    line: str
    missed: Mapping[str, float]
    chosen: OffloadOptions


def summed_up(
    asked: PlanOptions,
    found: Found,
    rows: Sequence[Mapping[str, Any]],
    refused: Sequence[Refused],
    notes: Sequence[str],
    machine: str | None,
    trace: str | None,
    files: Mapping[str, Callable[[Path], None]],
    out_dir: Path | None,
) -> Plan:
    first = found.judged[0]
    chosen = chosen_json(asked, first, out_dir)
    measured = rows[0]["measured"] if rows else None
    summary = {
        "feasible": first.feasible,
        "chosen": chosen,
        "predicted": first.estimate.to_json(),
        "measured": measured,
        "error": rows[0]["error"] if rows else None,
        "chosen_was_best": was_best(rows, asked),
        "alternatives": [
            {
                **parts_of(other.candidate),
                "misses": finite(other.missed),
                "predicted": other.estimate.to_json(),
                "loses_by": loses_by(other, first),
            }
            for other in found.judged[1 : 1 + SHOWN]
        ],
        "refused": [each._asdict() for each in dict.fromkeys(refused)],
        "assumptions": list(notes),
        "sources": {
            "machine": machine,
            "trace": trace,
            "card": ", ".join(asked.card) or None,
        },
        "search_s": found.seconds,
        "replays": found.replays,
        "verified": list(rows),
        "errors": errors_of(rows),
    }
    options, offload = first.candidate.options, chosen["offload"]
    if (placed := first.candidate.placement) is not None:
        root, given = "cluster", _cluster(asked, chosen, placed)
    else:
        root, given = "generate", _generate(asked, chosen)
    command = f"moe-edge {root} --gin_file {out_dir or '.'}/plan.gin"
    gin = gin_text(root, given, offload)
    tpot_s = first.estimate.tpot_s
    whole = chosen["weights"] and {"weights": chosen["weights"]}
    line = f"chosen: {chosen['placement'] or whole or chosen['offload']}"
    if tpot_s is not None:
        low, middle, high = (1e3 * s for s in tpot_s)
        line += f"; {middle:.2f} ms a token ({low:.2f} to {high:.2f})"
    if mapped := first.estimate.mapped_bytes[1]:
        line += f"; {mapped / 1e6:.4g} MB of experts stay in their files"
    text = readme(summary, command)
    return Plan(summary, gin, text, files, line, first.missed, options)


def finite(missed: Mapping[str, float]) -> dict[str, float | None]:
    """Shares by which targets are missed; None where nothing is known."""
    return {key: s if math.isfinite(s) else None for key, s in missed.items()}


def chosen_json(
    asked: PlanOptions, judged: Judged, out_dir: Path | None
) -> dict[str, Any]:
    """What a plan says of the configuration that it takes."""
    candidate, convert = judged.candidate, None
    checkpoint = asked.model_path
    kind, is_mapped = candidate.expert_dtype, judged.estimate.mapped_bytes[1] > 0
    # Of a config alone nobody knows whether files of ours, which can be mapped, exist.
    if kind is not None or (is_mapped and asked.config_json is not None):
        place = str(Path(out_dir or ".") / f"checkpoint{'_' * bool(kind)}{kind or ''}")
        command = ["moe-edge", "convert", "--src", checkpoint, "--dst", place]
        convert = shlex.join(command + ["--expert_dtype", kind] * bool(kind))
        checkpoint = place
    return {
        "checkpoint": checkpoint,
        **parts_of(candidate),
        "convert": convert,
    }


def _cluster(
    asked: PlanOptions, chosen: Mapping[str, Any], placed: Placed
) -> dict[str, Any]:
    """Servers of `moe-edge cluster`; without prompts they get texts of our families."""
    given: dict[str, Any] = {"checkpoint": chosen["checkpoint"]}
    count = len(placed.servers)
    given |= {"servers": count, "slots": ",".join(map(str, placed.slots))}
    if placed.path is not None:
        given["placement"] = placed.path
    if asked.prompts is not None:
        given |= {"prompts": asked.prompts, "max_new_tokens": asked.new_tokens}
    else:
        families = [*FAMILIES]
        names = [families[n % len(families)] for n in range(count)]
        given |= {"workload": ",".join(names), "output_tokens": asked.new_tokens}
    return given | _cache(asked) | {"max_batch": asked.batch, "seed": asked.seed}


def _generate(asked: PlanOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"checkpoint": chosen["checkpoint"]}
    if asked.prompts is None:
        given["prompt"] = [PROMPT]
    else:
        given["prompts"] = asked.prompts
    if chosen["k"] is not None:
        given["k"] = chosen["k"]
    if chosen["weights"] is not None:
        given["weights"] = chosen["weights"]
    elif parse_budget(chosen["offload"]["device_memory"]).share is None:
        given["max_context"] = asked.tokens  # for whose KV cache the size has room
    return (
        given
        | _cache(asked)
        | {
            "max_new_tokens": asked.new_tokens,
            "batch_size": asked.batch,
            "temperature": asked.temperature,
            "seed": asked.seed,
        }
    )


def _cache(asked: PlanOptions) -> dict[str, str]:
    return {} if asked.kv_cache == "float32" else {"kv_cache": asked.kv_cache}
