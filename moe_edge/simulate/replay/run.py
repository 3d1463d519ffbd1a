"""The root of `moe-edge replay`: hit ratios and prediction recall of a route trace."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_known, chosen
from moe_edge.core.files import plain_numbers, write_json
from moe_edge.core.progress import progress
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.core.typed import check_64_bits
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.offload.evict_base import get_eviction
from moe_edge.predict.base import PREDICTORS
from moe_edge.simulate.replay.drafts import Drafts, replay_drafts
from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import (
    POLICY_NAMES,
    check_horizon,
    known_policies,
    policy_of,
    slots_for,
)
from moe_edge.simulate.replay.predict import (
    known_predictors,
    predictor_of,
    replay_predictor,
)
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE, Trace


@root
def run_replay(
    run: RunFolder,
    *,
    trace: str,
    slots_per_layer: str,
    policies: str = "all",
    predictors: str = "all",
    policy_options: Mapping[str, Mapping[str, Any]] | None = None,
    predictor_options: Mapping[str, Mapping[str, Any]] | None = None,
    horizon: int = 1,
    drafts: str = "",
    num_experts: int | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Replays a trace through cache policies and predictors, without a model.

    Caches have equally many slots for every layer (adapmoe_dp: the same total) and are
    warmed by the prefill rows; hit ratios and recalls are those of the decode steps.

    Args:
      run: folder of the results: `replay.json`, `config.gin`.
      trace: CSV file of routing (`generate --trace` writes one), or a public trace.
      slots_per_layer: sizes of the cache to try: experts a layer, from 2, separated by
        commas.
      policies: eviction policies, separated by commas; `all`: every one for which the
        trace holds enough.
      predictors: predictors, separated by commas; `all` as above; an empty text: none.
      policy_options: {name: {option: value}} of policies.
      predictor_options: {name: {option: value}} of predictors.
      horizon: how many layers predictors look ahead.
      drafts: tokens of a sequence that a step would check together, from 2, separated
        by commas: what they share, the misses left with lru, and the acceptance of a
        draft from which a step moves less a token. For traces of one request at a time.
      num_experts: experts of a layer, for traces that do not say.
      data_dir: folder in which relative paths are looked up, too.
    Raises:
      MoeEdgeError: bad input; OSError: the trace cannot be read.
    """
    sizes = _whole_numbers("slots_per_layer", slots_per_layer)
    names = chosen("cache policy", policies, POLICY_NAMES) if policies else []
    predictor_names = chosen("predictor", predictors, PREDICTORS) if predictors else []
    path = find_file(trace, data_dir, "--trace")
    rows = read_trace(path, num_experts)
    if not (rows.phase == DECODE).any():
        raise ConfigError(f"trace {path} has no decode step (phase 1) to measure")
    check_horizon(horizon, rows)
    names = known_policies(rows) if names is None else names
    if predictor_names is None:
        predictor_names = known_predictors(rows)
    options = _of_each("policy_options", policy_options, names)
    built = {name: policy_of(name, rows, **options[name]) for name in names}
    options = _of_each("predictor_options", predictor_options, predictor_names)
    foreseers = {n: predictor_of(n, rows, **options[n]) for n in predictor_names}
    layer_S = {(n, size): slots_for(n, rows, size) for n in built for size in sizes}
    together = _whole_numbers("drafts", drafts) if drafts else []
    if run.dry_run:
        return {"policies": list(built), "predictors": list(foreseers)}
    cached = {
        name: {str(size): replay(rows, policy, layer_S[name, size]) for size in sizes}
        for name, policy in progress(built.items(), "cache policies replayed")
    }
    predicted = {
        name: replay_predictor(rows, predictor, horizon)
        for name, predictor in progress(foreseers.items(), "predictors replayed")
    }
    summary = {
        "hit_ratio": {
            name: {size: result.hit_ratio for size, result in by_size.items()}
            for name, by_size in cached.items()
        },
        "recall": {n: _by_look_ahead(log.recall_A) for n, log in predicted.items()},
        "precision": {
            n: _by_look_ahead(log.precision_A) for n, log in predicted.items()
        },
    }
    if together:
        given = sizes, lambda: get_eviction("lru")
        found = {n: replay_drafts(rows, n, *given) for n in together}
        summary["drafts"] = {str(n): _of_drafts(each) for n, each in found.items()}
    stored = summary | {
        "trace": _facts(rows) | {"path": path, "sha256": sha256_of(path)},
        "horizon": horizon,
        "left_out": {
            "policies": [n for n in POLICY_NAMES if n not in known_policies(rows)],
            "predictors": [
                n for n in PREDICTORS if n not in ("none", *known_predictors(rows))
            ],
        },
        "cache": {
            name: {size: _cache_details(result) for size, result in by_size.items()}
            for name, by_size in cached.items()
        },
        "prediction": {
            name: {
                "recall_by_layer": plain_numbers(log.recall_LA.T),
                "precision_by_layer": plain_numbers(log.precision_LA.T),
            }
            for name, log in predicted.items()
        },
    }
    run.write(lambda folder: write_json(folder / "replay.json", stored))
    print_tables(summary)
    return summary


def _of_each(
    what: str, given: Mapping[str, Mapping[str, Any]] | None, names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Options of every name; ConfigError for those of a name that is not there."""
    for name in given or {}:
        check_known(f"name in {what}", name, names)
    return {name: (given or {}).get(name, {}) for name in names}


def _whole_numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"--{flag} is {str(text)!r}, expected whole numbers separated by commas, "
            "such as 13,32,64"
        )
    numbers = list(dict.fromkeys(map(int, parts)))
    check_64_bits(f"--{flag}", numbers)
    return numbers


def _of_drafts(found: Drafts) -> dict[str, Any]:
    """For JSON; slots `0` are no cache."""
    return {
        "reused": round(found.reused, 6),
        "misses_left": _by_slots(found.misses_left),
        "break_even": _by_slots(found.break_even),
    }


def _by_slots(values: Mapping[int, float]) -> dict[str, float | None]:
    numbers = plain_numbers(np.array(list(values.values())))
    return dict(zip(map(str, values), numbers, strict=True))


def _by_look_ahead(share_H: np.ndarray) -> dict[str, float | None]:
    """By layers ahead, from 1."""
    return {str(row + 1): value for row, value in enumerate(plain_numbers(share_H))}


def _cache_details(result) -> dict[str, Any]:
    return {
        "hits": int(result.hits_L.sum()),
        "misses": int(result.misses_L.sum()),
        "prefill_hits": result.prefill_hits,
        "prefill_misses": result.prefill_misses,
        "hit_ratio_by_layer": plain_numbers(result.hit_ratio_L),
    }


def _facts(trace: Trace) -> dict[str, int]:
    return {
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layers": len(np.unique(trace.layer)),
        "requests": len(np.unique(trace.request)),
        "prefill_steps": len(np.unique(trace.step[trace.phase != DECODE])),
        "decode_steps": len(np.unique(trace.step[trace.phase == DECODE])),
    }


def print_tables(summary: dict[str, Any]) -> None:
    """The summary for people."""
    for measure, meaning, columns in (
        ("hit_ratio", "of the experts used, the share in a slot", "slots a layer"),
        ("recall", "of the experts used, the share predicted", "layers ahead"),
        ("precision", "of the predictions, the share used", "layers ahead"),
    ):
        rows = summary[measure]
        if rows:
            heads = next(iter(rows.values()))
            print(f"{measure.replace('_', ' ')}: {meaning}")
            print(f"{columns:>26}" + "".join(f"{head:>8}" for head in heads))
        for name, row in rows.items():
            values = ("-" if v is None else f"{v:.3f}" for v in row.values())
            print(f"{name:26}" + "".join(f"{value:>8}" for value in values))
    for tokens, found in summary.get("drafts", {}).items():
        print(f"{tokens} tokens a step: {found['reused']:.3f} of their choices shared")
        for size, accepted in found["break_even"].items():
            where = f"{size} slots a layer" if size != "0" else "without a cache"
            print(f"  {where}: drafts pay from an acceptance of {_shown(accepted)}")


def _shown(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"
