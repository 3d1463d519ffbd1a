"""Makes a plan: calibrates, replays candidates, chooses, verifies, says why."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.engine.auto_memory import AUTO, auto_memory
from moe_edge.engine.load import prepare_process
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_fits_model
from moe_edge.evaluate.texts import sha256_of
from moe_edge.offload.slot_plan import parse_budget
from moe_edge.planner import verify as verifying
from moe_edge.planner.calibrate import NONE, Calibrated, Protocol, calibrate
from moe_edge.planner.candidates import Refused, Space, refused_value, space_of
from moe_edge.planner.choose import Judged, loses_by
from moe_edge.planner.costs import ModelCosts
from moe_edge.planner.estimate import Subject
from moe_edge.planner.live import Live
from moe_edge.planner.machine_file import machine_json, stored_costs
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.prompts import sampled_prompts
from moe_edge.planner.quality import Quality, admitted
from moe_edge.planner.replayed import Recorded, layer_slots
from moe_edge.planner.search import Found, search
from moe_edge.planner.variants import variants
from moe_edge.planner.written import PROMPT, gin_text, readme
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.trace_writer import write_trace

PROMPTS = 16  # a sampled prompt's misses differ by 5 to 12 % from another's
NEW_TOKENS = 32  # of a calibration, at most
VERIFY_SEED = 1000  # beside the user's: other prompts
SHOWN = 8  # alternatives


class Plan(NamedTuple):
    """A plan, as it is printed and written."""

    summary: dict[str, Any]
    gin: str
    readme: str
    files: Mapping[str, Callable[[Path], None]]
    line: str
    missed: Mapping[str, float]
    chosen: Any


def check(
    asked: PlanOptions, base: OffloadOptions, fixed: frozenset
) -> tuple[Any, OffloadOptions]:
    """What a plan would refuse before it measures.

    Returns:
      the open checkpoint, and the user's options with a budget.
    """
    reader = open_checkpoint(asked.checkpoint or "default")
    prepare_process(reader, base)
    if base.device_memory == OffloadOptions.device_memory and (
        "device_memory" not in fixed and asked.device_memory in (None, AUTO)
    ):
        base = dataclasses.replace(base, device_memory=auto_memory(reader))
    check_fits_model(reader, base)
    for name in fixed:
        if (wrong := refused_value(name, getattr(base, name))) is not None:
            raise ConfigError(f"{wrong.what} is fixed: {wrong.reason}; {wrong.remedy}")
    return reader, base


def make_plan(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    out_dir: Path | None = None,
) -> Plan:
    """The plan of a checkpoint on this machine.

    Args:
      base, fixed: of `PlanOptions.base`.
      out_dir: where it will be written; None: nowhere.
    """
    reader, base = check(asked, base, fixed)
    checkpoint, context = asked.checkpoint or "default", asked.tokens
    live = Live(checkpoint, None, asked.batch, context)
    layer_slots(base, live)  # refuses a budget of too few slots, and names the least
    notes: list[str] = []
    qualities, refused = _qualities(asked, base, checkpoint)
    space = space_of(base, fixed, live.config, qualities, refused)
    protocol = _protocol(asked, live, asked.seed, notes)
    done, entries = _calibrated(asked, live, space, protocol, notes)
    own = Subject(live, done.costs, done.recorded)
    given = checkpoint, own, base, qualities, protocol, context
    with variants(*given) as (subjects, failed):
        possible = [q for q in qualities if (q.k, q.expert_dtype) in subjects]
        found = search(space, subjects, possible, asked)
        rows: list[dict[str, Any]] = []
        if asked.verify:
            other = _protocol(asked, live, asked.seed + VERIFY_SEED, [])
            wanted = found.judged[: 1 + asked.verify_top]
            rows = verifying.verify(wanted, subjects, other, asked)
    for name in done.left_out:
        reason = f"the calibration's {asked.calibrate_s:g} s were over"
        failed.append(Refused(name, reason, "raise --calibrate_s"))
    refused = [*space.refused, *failed, *found.refused]
    notes += _assumptions(asked, done.costs, live, subjects)
    sources = {
        "machine": asked.machine or "measured here (machine.json)",
        "trace": asked.trace or "recorded here (trace.csv.gz)",
        "card": ", ".join(asked.card) or None,
    }
    files: dict[str, Callable[[Path], None]] = {}
    if entries:
        stored = machine_json(asked.machine, entries)
        files["machine.json"] = lambda at: write_json(at, stored)
    if asked.trace is None:
        trace = done.recorded.trace
        files["trace.csv.gz"] = lambda at: write_trace(at, trace)
    return _plan(asked, found, rows, refused, notes, sources, files, out_dir)


def _qualities(
    asked: PlanOptions, base: OffloadOptions, checkpoint: str
) -> tuple[list[Quality], list[Refused]]:
    share = parse_budget(base.device_memory).share
    return admitted(asked, base, checkpoint, share)


def _protocol(asked: PlanOptions, live: Live, seed: int, notes: list[str]) -> Protocol:
    count = -(-PROMPTS // live.batch) * live.batch
    given = live.reader, count, asked.prompt_tokens, seed, asked.prompts
    prompts, kind = sampled_prompts(*given)
    new = min(asked.new_tokens, NEW_TOKENS)
    notes.append(
        f"prompts: {kind}, {count} of {asked.prompt_tokens} tokens, {new} new ones each"
    )
    return Protocol(
        prompts=prompts,
        new_tokens=new,
        sampling=verifying.sampling_of(asked),
        limit_s=asked.calibrate_s,
    )


def _calibrated(
    asked: PlanOptions, live: Live, space: Space, protocol: Protocol, notes: list[str]
) -> tuple[Calibrated, dict[str, dict[str, Any]]]:
    """Costs and routing, measured or read; what of it a machine file will keep."""
    given = _given_trace(asked, live, notes)
    content, k = live.reader.content_sha256(), live.config.moe.top_k
    costs: ModelCosts | None = None
    if asked.machine is not None:
        costs = stored_costs(asked.machine, content, k, live.batch)
    if costs is not None and given is not None:
        if costs.temperature != asked.temperature:
            notes.append(
                f"the machine's calibration decoded at temperature "
                f"{costs.temperature:g}, the plan is for {asked.temperature:g}"
            )
        return Calibrated(costs, given, []), {}
    predictors = {
        each["predictor"]: dataclasses.replace(space.base, **each)
        for each in space.values["predictor"]
    }
    assists = [each["assist"] for each in space.values["assist"] if each["assist"]]
    base = dataclasses.replace(space.base, predictor=NONE, predictor_options={})
    done = calibrate(live, base, predictors, assists, protocol)
    if given is not None:  # predictions are of the lookups that were recorded here
        done = done._replace(recorded=given)
    return done, {content: {str(k): done.costs.to_json()}}


def _given_trace(asked: PlanOptions, live: Live, notes: list[str]) -> Recorded | None:
    """The user's trace; ConfigError for one of another model."""
    if asked.trace is None:
        return None
    trace, config = read_trace(asked.trace), live.config
    layers = {*trace.layer.tolist()}
    shape = trace.num_experts, trace.top_k
    if shape != (config.moe.num_experts, config.moe.top_k) or layers != {
        *config.moe_layers
    }:
        raise ConfigError(
            f"trace {asked.trace} has {len(layers)} layers of {shape[0]} experts, "
            f"{shape[1]} a token; the model {len(config.moe_layers)} of "
            f"{config.moe.num_experts}, {config.moe.top_k} a token; record one of this "
            "model (moe-edge generate --trace)"
        )
    notes.append(
        f"trace {Path(asked.trace).name} (sha256 {sha256_of(asked.trace)[:12]}) does "
        f"not say its temperature, nor whether its tokens were drawn: it stands for "
        f"decoding at {asked.temperature:g}; predictors that replay cannot ask are "
        "left out"
    )
    return Recorded(trace, {})


def _assumptions(
    asked: PlanOptions, costs: ModelCosts, live: Live, subjects
) -> list[str]:
    found = [
        f"decoding at temperature {asked.temperature:g}, batch {live.batch}; other "
        "prompts are like these",
        "mode layered, one device",
    ]
    if asked.temperature == 0:
        found.append(
            "greedy decoding of a small model may repeat itself: its misses differ by "
            "20 to 60 % between prompts, so only the ranges count"
        )
    if len(subjects) > 1:
        found.append(
            "other formats and K choose the experts that the model as it is chose, and "
            "predictors add to them what they add to it"
        )
    for path in asked.card:
        found.append(f"card {path}: what it says of its text holds for other texts")
    return found


def _plan(
    asked: PlanOptions,
    found: Found,
    rows: Sequence[Mapping[str, Any]],
    refused: Sequence[Refused],
    notes: Sequence[str],
    sources: Mapping[str, Any],
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
        "chosen_was_best": verifying.was_best(rows, asked),
        "alternatives": [
            {
                "offload": other.candidate.changes,
                "k": other.candidate.k,
                "predicted": other.estimate.to_json(),
                "loses_by": loses_by(other, first),
            }
            for other in found.judged[1 : 1 + SHOWN]
        ],
        "refused": [each._asdict() for each in dict.fromkeys(refused)],
        "assumptions": list(notes),
        "sources": dict(sources),
        "search_s": found.seconds,
        "replays": found.replays,
        "verified": list(rows),
    }
    command = f"moe-edge generate --gin_file {out_dir or '.'}/plan.gin"
    options = first.candidate.options
    gin = gin_text(_generate(asked, chosen), {**chosen["offload"]})
    tpot_s = first.estimate.tpot_s
    line = f"chosen: {chosen['offload']}"
    if tpot_s is not None:
        low, middle, high = (1e3 * s for s in tpot_s)
        line += f"; {middle:.2f} ms a token ({low:.2f} to {high:.2f})"
    text = readme(summary, command)
    return Plan(summary, gin, text, files, line, first.missed, options)


def chosen_json(
    asked: PlanOptions, judged: Judged, out_dir: Path | None
) -> dict[str, Any]:
    """What a plan says of the configuration that it takes."""
    candidate, convert = judged.candidate, None
    offload = {
        name: value
        for name, value in candidate.changes.items()
        if name not in ("k", "expert_dtype")
    }
    offload = {"device_memory": candidate.options.device_memory} | offload
    checkpoint = asked.checkpoint or "default"
    if candidate.expert_dtype is not None:
        place = Path(out_dir or ".") / f"checkpoint_{candidate.expert_dtype}"
        convert = shlex.join(
            ["moe-edge", "convert", "--src", checkpoint, "--dst", str(place)]
            + ["--expert_dtype", candidate.expert_dtype]
        )
        checkpoint = str(place)
    return {
        "checkpoint": checkpoint,
        "k": candidate.k,
        "offload": offload,
        "expert_dtype": candidate.expert_dtype,
        "convert": convert,
        "placement": None,
    }


def _generate(asked: PlanOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"checkpoint": chosen["checkpoint"]}
    if asked.prompts is None:
        given["prompt"] = [PROMPT]
    else:
        given["prompts"] = asked.prompts
    if chosen["k"] is not None:
        given["k"] = chosen["k"]
    return given | {
        "max_new_tokens": asked.new_tokens,
        "max_context": asked.tokens,
        "batch_size": asked.batch,
        "temperature": asked.temperature,
        "seed": asked.seed,
    }
