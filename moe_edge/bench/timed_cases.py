"""Times the cases of a study round by round, the resident engine among them.

In every round all cases of a batch size continue the same prompts, which no other
round has, and the resident engine does too: its tokens are what lossless cases must
give.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.bench.cases import (
    Case,
    CaseSettings,
    Ready,
    past_prompts,
    prepare,
    prompts_of,
)
from moe_edge.bench.engines import Bench
from moe_edge.bench.prompts import check_inputs, forced_pool, tokenizer_of
from moe_edge.bench.rounds import measure_rounds
from moe_edge.engine.base import Engine
from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.evaluate.agreement import Agreement, compare
from moe_edge.evaluate.stepwise import Forced, score_batches
from moe_edge.metrics.frames import Estimate, Rows, frame, interval, median

TIMING = frame(
    "policy budget batch",
    "tpot_ms hit_ratio moved_mb link_ms wait_ms host_ms agreement perplexity_ratio",
)
LAYER = frame("", "layer_ms")  # of a resident decode step
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
      link_s, wait_s, host_s: of a decode step, seconds that the link was busy, that the
        engine stood still for it, and that the host computed experts.
      is_same: whether the tokens were the resident engine's.
      fidelity: of a case that is not exact, judged after the rounds.
    """

    case: Case
    tpot_s: Sequence[float]
    hit_ratio: Sequence[float]
    step_bytes: Sequence[float]
    is_same: Sequence[bool]
    link_s: Sequence[float] = ()
    wait_s: Sequence[float] = ()
    host_s: Sequence[float] = ()
    fidelity: Agreement | None = None

    def median(self, measure: str) -> float:
        """Of what is measured in rounds, by its attribute."""
        return float(np.median(getattr(self, measure)))

    def measures(self) -> dict[str, Estimate]:
        """Medians of the rounds, and the fidelity: measures of `TIMING`."""
        found = {
            "tpot_ms": median(self.tpot_s, scale=1e3),
            "hit_ratio": median(self.hit_ratio),
            "moved_mb": median(self.step_bytes, scale=1e-6),
            "link_ms": median(self.link_s, scale=1e3),
            "wait_ms": median(self.wait_s, scale=1e3),
            "host_ms": median(self.host_s, scale=1e3),
        }
        if (one := self.fidelity) is not None:
            found["agreement"] = interval(
                one.agreement, one.agreement_interval95, one.tokens
            )
            found["perplexity_ratio"] = interval(
                one.perplexity_ratio, one.ratio_interval95, one.tokens
            )
        return found


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

    def tell(self, rows: Rows, model: Mapping, settings: TimedSettings) -> None:
        """Adds all cases and the resident engine to frames `timing` and `layer`, and
        what is said of the run."""
        for one in self.timed.values():
            rows("timing", *one.case.key, **one.measures())
        for batch, times_s in self.resident_s.items():
            tpot_ms = median(times_s, scale=1e3)
            rows("timing", "resident", "100%", batch, tpot_ms=tpot_ms)
        rows("layer", layer_ms=1e3 * self.ready.layer_s)
        rows.checks |= self.checks()
        workload = self.ready.workload(settings)
        kind = self.ready.kind
        rows.about |= {"model": model, "workload": workload, "kind": kind}


def check_prompts(settings: TimedSettings) -> None:
    """As `check_inputs`; also refuses files that do not hold enough prompts to measure
    and to judge (RequestError)."""
    check_inputs(settings)
    tokenizer = tokenizer_of(settings)
    past_prompts(settings, tokenizer)
    prompts_of(settings, tokenizer, max(settings.batches))
    forced_pool(settings, tokenizer, settings.fidelity_rows)


def run_cases(
    bench: Bench, cases: Sequence[Case], settings: TimedSettings, history=None
) -> Timing:
    """Measures all cases; arguments as of `prepare`."""
    return time_cases(bench, cases, prepare(bench, cases, settings, history), settings)


def time_cases(
    bench: Bench,
    cases: Sequence[Case],
    ready: Ready,
    settings: TimedSettings,
    num_compiled: Callable[[], int] | None = None,
    judged: Callable[[Case], bool] = lambda case: not case.is_exact,
) -> Timing:
    """Measures cases that are ready, an engine a case.

    Args:
      num_compiled: programs of all engines, if not all are the bench's.
      judged: whose fidelity is measured after the rounds.
    """
    num_compiled = num_compiled or bench.num_compiled
    run, calls = functools.partial(_run, settings.new_tokens), {}
    for case, engine in zip(cases, ready.engines, strict=True):
        calls[case.batch] = functools.partial(run, bench.resident, case.batch)
        calls[case.key] = functools.partial(run, engine, case.batch)
    found = measure_rounds(calls, ready.rounds, num_compiled=num_compiled)
    timed, resident_s = {}, {}
    for case in cases:
        resident = found[case.batch]
        resident_s[case.batch] = [one.tpot_s for one in resident]
        steps = [one._asdict() for one in found[case.key]]
        rounds = {name: [one[name] for one in steps] for name in Steps._fields}
        is_same = [
            ours == one.tokens
            for ours, one in zip(rounds.pop("tokens"), resident, strict=True)
        ]
        timed[case.key] = Timed(case, is_same=is_same, **rounds)
    engines = zip(timed.values(), ready.engines, strict=True)
    _judge(bench, [pair for pair in engines if judged(pair[0].case)], settings)
    return Timing(timed, resident_s, ready, found.checks())


class Steps(NamedTuple):
    """What a run's decode steps took, in the mean; see `Timed`."""

    tpot_s: float
    tokens: Any
    hit_ratio: float | None
    step_bytes: float
    link_s: float
    wait_s: float
    host_s: float


def _used(engine: Engine) -> np.ndarray:
    """Bytes moved, and seconds of link, of waiting and of the host's experts so far."""
    moved_bytes = engine.movement()["bytes_moved"]
    if not isinstance(engine, LayeredEngine):
        return np.array([moved_bytes, 0, 0, 0])
    sent, counters = engine.queue.stats(), engine.layer_step.counters
    link_s = sent.demand.seconds + sent.prefetch.seconds
    wait_s = sum(counted.wait_s for counted in counters.values())
    host_s = sum(backend.busy_s for backend in engine.backends)
    return np.array([moved_bytes, link_s, wait_s, host_s])


def _run(new_tokens: int, engine: Engine, batch: int, prompts) -> Steps:
    at_first: list[np.ndarray] = []

    def on_token(row: int, token: int) -> None:
        if not at_first:
            at_first.append(_used(engine))

    engine.reset_records()
    run = generate(engine, prompts[:batch], new_tokens, on_token=on_token)
    used = (_used(engine) - at_first[0]) / run.steps
    tpot_s, hit_ratio = run.decode_s / run.steps, engine.movement()["hit_ratio"]
    return Steps(tpot_s, run.tokens, hit_ratio, *used.tolist())


def _judge(
    bench: Bench, lossy: Sequence[tuple[Timed, Engine]], settings: TimedSettings
) -> None:
    """Teacher-forced fidelity, on real text, of cases that may give other tokens.

    Shapes are those of the timed runs, so that nothing is compiled for it.
    """
    if not lossy:
        return
    pool = forced_pool(settings, bench.tokenizer, settings.fidelity_rows)
    rows = [Forced(ids, settings.prompt_tokens) for ids in pool.rows]
    references = {
        batch: score_batches(bench.resident, rows, batch)
        for batch in {one.case.batch for one, _ in lossy}
    }
    for one, engine in lossy:
        run = score_batches(engine, rows, one.case.batch)
        one.fidelity = compare(run, references[one.case.batch])
