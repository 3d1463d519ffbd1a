"""Runs the chosen configuration and the next ones on prompts that no plan has seen."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.progress import progress
from moe_edge.model.sampling import Sampling
from moe_edge.planner import mapped
from moe_edge.planner.calibrate import NONE, OWN_LINK, Protocol, rounds_of
from moe_edge.planner.candidates import parts_of
from moe_edge.planner.choose import KEYS, Judged
from moe_edge.planner.estimate import Estimate, Subject, estimate
from moe_edge.planner.live import Live, Run
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.replayed import Recorded, predictor_name

COMPARED = ("tpot_s", "ttft_s", "tokens_per_s", "device_bytes", "hit_ratio")


def measured_of(run: Run, live: Live, options) -> dict[str, float | None]:
    """A run by the keys of an estimate; nothing is known of fidelity."""
    tpot_s = run.tpot_s
    return {
        "tpot_s": tpot_s,
        "ttft_s": float(np.median(run.ttft_s)),
        "tokens_per_s": live.batch / tpot_s,
        "device_bytes": run.device_bytes + live.needs(options).cache,
        "host_bytes": None,
        "mapped_bytes": None,
        "hit_ratio": run.hit_ratio,
        "ppl_ratio": None,
        "agreement": None,
    }


def errors(
    measured: Mapping[str, float | None], predicted: Estimate
) -> dict[str, float | None]:
    """Measured over the middle of what was predicted, less 1."""
    found: dict[str, float | None] = {}
    for key, value in measured.items():
        expected = getattr(predicted, key)
        known = value is not None and expected is not None and expected[1]
        found[key] = value / expected[1] - 1 if known else None
    return found


def verify(
    judged: Sequence[Judged],
    subjects: Mapping[tuple, Subject],
    protocol: Protocol,
) -> list[dict[str, Any]]:
    """What each configuration took; of lossless ones also the error of what is computed
    from its own lookups, where what was chosen is known and time alone is computed.

    Args:
      judged: the chosen one first.
      protocol: with other prompts than the calibration's.
    """
    given = protocol.prompts, protocol.new_tokens, protocol.sampling
    traces: dict[tuple, Recorded] = {}
    rows = []
    for one in progress(judged, "configurations verified"):
        candidate, own_error = one.candidate, None
        key = candidate.k, candidate.expert_dtype
        live, options = subjects[key].live, candidate.options
        if candidate.weights is not None:
            measured = mapped.measured_of(live, protocol)
        else:
            with live.engine(options) as engine:
                run = live.run(engine, *given, rounds=rounds_of(options))
            measured = measured_of(run, live, options)
        if candidate.weights is None and options.lossless:
            if key not in traces:
                traces[key] = _record(live, subjects[key], options, given)
            name = predictor_name(options)
            own = traces[key].with_predictions(name, run.log.predicted)
            subject = Subject(live, subjects[key].costs, own)
            middle = estimate(candidate, subject).tpot_s[1]
            own_error = measured["tpot_s"] / middle - 1
        rows.append(
            {
                **parts_of(candidate),
                "predicted": one.estimate.to_json(),
                "measured": measured,
                "error": errors(measured, one.estimate),
                "own_lookups_error": own_error,
            }
        )
    return rows


def _record(live: Live, subject: Subject, options, given) -> Recorded:
    """What the model chooses for these prompts, whatever the options."""
    plain = {"predictor": NONE, "predictor_options": {}, "assist": None, **OWN_LINK}
    with live.engine(dataclasses.replace(options, **plain), with_trace=True) as engine:
        trace = live.run(engine, *given).trace
    return Recorded(trace, {}, subject.recorded.temperature)


def was_best(rows: Sequence[Mapping[str, Any]], asked: PlanOptions) -> bool | None:
    """Whether the first row is within the margin of the best; None: nobody ran."""
    key = KEYS[asked.objective]
    key = key if key in COMPARED else "tpot_s"
    values = [row["measured"][key] for row in rows]
    if not values:
        return None
    return values[0] <= min(values) * (1 + asked.margin_share)


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far the time of a step was off: of replays of each run's own lookups, and of
    the prediction, which knew other prompts alone. None: nobody ran."""
    if not rows:
        return None
    own = [row["own_lookups_error"] for row in rows]
    other = [row["error"]["tpot_s"] for row in rows]
    found = {}
    for name, each in (("own_lookups", own), ("other_prompts", other)):
        sizes = [abs(error) for error in each if error is not None]
        median = float(np.median(sizes)) if sizes else None
        worst = max(sizes, default=None)
        found[name] = {"median": median, "worst": worst, "runs": len(sizes)}
    return found


def sampling_of(asked: PlanOptions) -> Sampling:
    return Sampling(temperature=asked.temperature, seed=asked.seed)
