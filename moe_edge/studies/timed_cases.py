"""Times the cases of a study: compile first, then interleave them, round by round.

In every round all cases of a batch size continue the same prompts, which no other
round has, and the resident engine does too: its tokens are what lossless cases must
give.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.engine.generate import Generation, generate
from moe_edge.evaluate.agreement import Agreement, compare
from moe_edge.evaluate.stepwise import Forced, score_batches
from moe_edge.metrics.results import metric
from moe_edge.studies.cases import Case, Ready, prepare
from moe_edge.studies.engines import Bench, StudyEngine
from moe_edge.studies.prompts import make_pool
from moe_edge.studies.smoe.settings import Settings
from moe_edge.studies.study import median_and_spread


@dataclasses.dataclass
class Timed:
    """What the rounds of a case gave, one entry a round.

    Attributes:
      tpot_s: seconds of a decode step, of the whole batch.
      hit_ratio: experts of a decode lookup that were in slots, ready.
      step_bytes: moved for a decode step, prefetched ones included.
      is_same: whether the tokens were the resident engine's.
      fidelity: of a case that is not exact.
    """

    case: Case
    tpot_s: list[float] = dataclasses.field(default_factory=list)
    hit_ratio: list[float] = dataclasses.field(default_factory=list)
    step_bytes: list[float] = dataclasses.field(default_factory=list)
    is_same: list[bool] = dataclasses.field(default_factory=list)
    fidelity: Agreement | None = None

    def rows(self) -> list[dict]:
        """Metric rows: medians with their spread, and the fidelity."""
        at, policy = self.case.setting, self.case.policy
        rows = []
        for name, values, scale, unit in (
            ("TPOT", self.tpot_s, 1e3, "ms"),
            ("cache ratio", self.hit_ratio, 1, "1"),
            ("moved a step", self.step_bytes, 1e-6, "MB"),
        ):
            value, spread = median_and_spread(np.asarray(values) * scale)
            rows.append(
                metric(policy, f"{name}, {at}", value, unit, len(values), spread)
            )
        if self.fidelity is not None:
            found = self.fidelity
            low, high = found.agreement_interval95
            rows.append(
                metric(
                    policy, f"teacher-forced agreement, {at}", found.agreement, "1",
                    found.tokens, ("half 95% interval", (high - low) / 2),
                )
            )  # fmt: skip
            low, high = found.ratio_interval95
            rows.append(
                metric(
                    policy, f"perplexity ratio, {at}", found.perplexity_ratio, "1",
                    found.tokens, ("half 95% interval", (high - low) / 2),
                )
            )  # fmt: skip
        return rows


@dataclasses.dataclass(frozen=True)
class Timing:
    """All cases, and what they were measured under.

    Attributes:
      timed: in the order of the cases.
      resident_s: by batch, seconds of a resident decode step, one a round.
      ready: engines, link and prompts.
      compiled_late: programs compiled while measuring (should be 0).
    """

    timed: Sequence[Timed]
    resident_s: dict[int, list[float]]
    ready: Ready
    compiled_late: int

    def find(self, policy: str, budget: str, batch: int) -> Timed:
        key = (policy, budget, batch)
        for one in self.timed:
            if (one.case.policy, one.case.budget, one.case.batch) == key:
                return one
        raise KeyError(key)

    def checks(self) -> dict[str, bool]:
        exact = [one for one in self.timed if one.case.is_exact]
        return {
            "every lossless case gave the resident engine's tokens in every round": all(
                all(one.is_same) for one in exact
            ),
            "no program was compiled while measuring": self.compiled_late == 0,
        }

    def resident_rows(self) -> list[dict]:
        rows = []
        for batch, times_s in self.resident_s.items():
            value, spread = median_and_spread(np.asarray(times_s) * 1e3)
            name = f"TPOT, 100%, batch {batch}"
            rows.append(metric("resident", name, value, "ms", len(times_s), spread))
        rows.append(metric("resident", "one layer", 1e3 * self.ready.layer_s, "ms"))
        return rows


def run_cases(
    bench: Bench, cases: Sequence[Case], settings: Settings, history=None
) -> Timing:
    """Measures all cases; arguments as of `prepare`."""
    ready = prepare(bench, cases, settings, history)
    compiled = bench.num_compiled()
    timed = [Timed(case) for case in cases]
    resident_s: dict[int, list[float]] = {case.batch: [] for case in cases}
    pairs = list(zip(timed, ready.engines, strict=True))
    for number, prompts in enumerate(ready.rounds):
        expected = {}
        for batch, times_s in resident_s.items():
            run = generate(bench.resident, prompts[:batch], settings.new_tokens)
            times_s.append(run.decode_s / run.steps)
            expected[batch] = run.tokens
        # There and back, so that no case always comes first.
        for one, engine in pairs if number % 2 == 0 else reversed(pairs):
            batch = one.case.batch
            run, moved = _decode_bytes(engine, prompts[:batch], settings.new_tokens)
            one.tpot_s.append(run.decode_s / run.steps)
            one.hit_ratio.append(engine.movement()["hit_ratio"])
            one.step_bytes.append(moved / run.steps)
            one.is_same.append(run.tokens == expected[batch])
    late = bench.num_compiled() - compiled
    _judge(bench, pairs, settings)
    return Timing(timed, resident_s, ready, late)


def _decode_bytes(engine: StudyEngine, prompts, new_tokens: int):
    """(a generation, bytes moved by its decode steps)."""
    at_first: list[int] = []

    def on_token(row: int, token: int) -> None:
        if not at_first:
            at_first.append(engine.movement()["bytes_moved"])

    engine.reset_records()
    run: Generation = generate(engine, prompts, new_tokens, on_token=on_token)
    return run, engine.movement()["bytes_moved"] - at_first[0]


def _judge(bench: Bench, pairs, settings: Settings) -> None:
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
