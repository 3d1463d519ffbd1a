"""Times the cases of a study round by round, the resident engine among them.

In every round all cases of a batch size continue the same prompts, which no other
round has, and the resident engine does too: its tokens are what lossless cases must
give.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.generate import generate
from moe_edge.evaluate.agreement import Agreement, compare
from moe_edge.evaluate.stepwise import Forced, score_batches
from moe_edge.metrics.results import interval_metric, metric
from moe_edge.studies.cases import Case, CaseSettings, Ready, prepare
from moe_edge.studies.engines import Bench
from moe_edge.studies.prompts import make_pool
from moe_edge.studies.rounds import measure_rounds, median_metric

SAME = "every lossless case gave the resident engine's tokens in every round"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedSettings(CaseSettings):
    """A study that times cases; `CaseSettings` names the rest.

    Attributes:
      fidelity_rows: real texts of `new_tokens` teacher-forced tokens each, for cases
        that are not lossless.
    """

    fidelity_rows: int = 3


@dataclasses.dataclass
class Timed:
    """What the rounds of a case gave, one entry a round.

    Attributes:
      tpot_s: seconds of a decode step, of the whole batch.
      hit_ratio: experts of a decode lookup that were in slots, ready.
      step_bytes: moved for a decode step, prefetched ones included.
      is_same: whether the tokens were the resident engine's.
      fidelity: of a case that is not exact, judged after the rounds.
    """

    case: Case
    tpot_s: Sequence[float]
    hit_ratio: Sequence[float]
    step_bytes: Sequence[float]
    is_same: Sequence[bool]
    fidelity: Agreement | None = None

    def median(self, measure: str) -> float:
        """Of `tpot_s`, `hit_ratio` or `step_bytes`."""
        return float(np.median(getattr(self, measure)))

    def rows(self) -> list[dict]:
        """Metric rows: medians with their spread, and the fidelity."""
        at, policy = self.case.setting, self.case.policy
        rows = [
            median_metric(policy, f"{name}, {at}", values, unit, scale)
            for name, values, scale, unit in (
                ("TPOT", self.tpot_s, 1e3, "ms"),
                ("cache ratio", self.hit_ratio, 1, "1"),
                ("moved a step", self.step_bytes, 1e-6, "MB"),
            )
        ]
        if (found := self.fidelity) is not None:
            tokens = found.tokens
            agreed = found.agreement, found.agreement_interval95
            kept = found.perplexity_ratio, found.ratio_interval95
            for name, (value, interval) in (
                (f"teacher-forced agreement, {at}", agreed),
                (f"perplexity ratio, {at}", kept),
            ):
                rows.append(interval_metric(policy, name, value, interval, tokens))
        return rows


@dataclasses.dataclass(frozen=True)
class Timing:
    """All cases, and what they were measured under.

    Attributes:
      timed: by (policy, budget, batch), in the order of the cases.
      resident_s: by batch, seconds of a resident decode step, one a round.
      ready: engines, link and prompts.
      on_time: the check that nothing was compiled late.
    """

    timed: Mapping[tuple[str, str, int], Timed]
    resident_s: Mapping[int, Sequence[float]]
    ready: Ready
    on_time: Mapping[str, bool]

    def __getitem__(self, case: tuple[str, str, int]) -> Timed:
        return self.timed[case]

    def checks(self) -> dict[str, bool]:
        exact = (one.is_same for one in self.timed.values() if one.case.is_exact)
        return {SAME: all(map(all, exact)), **self.on_time}

    def rows(self) -> list[dict]:
        """Metric rows of all cases and of the resident engine."""
        rows = [row for one in self.timed.values() for row in one.rows()]
        for batch, times_s in self.resident_s.items():
            name = f"TPOT, 100%, batch {batch}"
            rows.append(median_metric("resident", name, times_s, "ms", 1e3))
        layer_ms = 1e3 * self.ready.layer_s
        return [*rows, metric("resident", "one layer", layer_ms, "ms")]


def run_cases(
    bench: Bench, cases: Sequence[Case], settings: TimedSettings, history=None
) -> Timing:
    """Measures all cases; arguments as of `prepare`."""
    ready = prepare(bench, cases, settings, history)
    run, calls = functools.partial(_run, settings.new_tokens), {}
    for case, engine in zip(cases, ready.engines, strict=True):
        calls[case.batch] = functools.partial(run, bench.resident, case.batch)
        calls[case.key] = functools.partial(run, engine, case.batch)
    found = measure_rounds(calls, ready.rounds, num_compiled=bench.num_compiled)
    timed, resident_s = {}, {}
    for case in cases:
        resident_s[case.batch], expected, *_ = zip(*found[case.batch], strict=True)
        tpot_s, tokens, hit_ratio, step_bytes = zip(*found[case.key], strict=True)
        is_same = [ours == given for ours, given in zip(tokens, expected, strict=True)]
        timed[case.key] = Timed(case, tpot_s, hit_ratio, step_bytes, is_same)
    _judge(bench, zip(timed.values(), ready.engines, strict=True), settings)
    return Timing(timed, resident_s, ready, found.checks())


def _run(new_tokens: int, engine: Engine, batch: int, prompts):
    """(seconds of a decode step, tokens, hit ratio, bytes moved for a decode step)."""
    at_first: list[int] = []

    def on_token(row: int, token: int) -> None:
        if not at_first:
            at_first.append(engine.movement()["bytes_moved"])

    engine.reset_records()
    run = generate(engine, prompts[:batch], new_tokens, on_token=on_token)
    moved = engine.movement()
    step_bytes = (moved["bytes_moved"] - at_first[0]) / run.steps
    return run.decode_s / run.steps, run.tokens, moved["hit_ratio"], step_bytes


def _judge(bench: Bench, pairs, settings: TimedSettings) -> None:
    """Teacher-forced fidelity, on real text, of the cases that may give other tokens.

    Shapes are those of the timed runs, so that nothing is compiled for it.
    """
    lossy = [(one, engine) for one, engine in pairs if not one.case.is_exact]
    if not lossy:
        return
    length = settings.prompt_tokens + settings.new_tokens
    pool = make_pool(settings, bench.tokenizer, settings.fidelity_rows, length)
    rows = [Forced(ids, settings.prompt_tokens) for ids in pool.rows]
    references = {
        batch: score_batches(bench.resident, rows, batch)
        for batch in {one.case.batch for one, _ in lossy}
    }
    for one, engine in lossy:
        run = score_batches(engine, rows, one.case.batch)
        one.fidelity = compare(run, references[one.case.batch])
