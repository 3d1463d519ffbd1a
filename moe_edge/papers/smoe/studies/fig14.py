"""SMoE, figure 14: what each part of SMoE adds to a static cache.

From the same runs: how many of the router's top-score and low-score choices had to be
brought (figure 15), how long the link was busy beside the time of a step (figure 16),
the host beside the link (figure 18), and what a step's time goes to (table I). Who was
brought is read from traces of further runs of the same prompts.

Every step keeps what the one before it has:
base: a static cache of the experts that earlier prompts used most; an absent expert
travels on demand and leaves first;
+CE: eviction by mean gate score; +CR: substitution of low-score experts; +Pre:
prefetching of predicted top-score experts; +BA: the host computes absent experts
during transfers, by two pointers (CPU-assisted scheduling, which balances).

The paper's base is llama.cpp with some experts kept on the GPU; it names neither
which nor how absent ones are computed in the later steps. llama.cpp computes
absent experts on the CPU; `base on CPU` is that, by Fiddler's rule. Here the CPU is
the device too, so it is kept apart: each step from `base` changes one thing only.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_edge.bench.cases import Case, count_history, linked, past_sequences
from moe_edge.bench.derived import changes
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.settings import Budget, Margin
from moe_edge.bench.study import Study
from moe_edge.bench.timed_cases import (
    LAYER,
    TIMING,
    TimedSettings,
    Timing,
    check_prompts,
    run_cases,
)
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Rows, Tables, frame
from moe_edge.model.config import ModelConfig
from moe_edge.papers.smoe.studies.score_classes import Brought, brought

STEPS = ("base", "+CE", "+CR", "+Pre", "+BA")
ON_CPU = "base on CPU"
SHOWN = ("top_absent", "low_absent", "link_ms", "tpot_ms", "host_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetSettings(TimedSettings):
    """A study of policies by budget; `TimedSettings` names the rest.

    Attributes:
      budgets: device memory of the experts.
      a: SMoE's margin, for routing and for what is prefetched.
    """

    rounds: int = 2
    budgets: Sequence[Budget] = ("15%", "25%", "50%")
    a: Margin = 0.2


def bases(profile_LE: np.ndarray) -> dict[str, OffloadOptions]:
    """What SMoE is added to: a static cache of the experts that were used most."""
    base = studied(eviction="static_oracle", eviction_options={"profile": profile_LE})
    return {STEPS[0]: base, ON_CPU: dataclasses.replace(base, assist="fiddler")}


def smoe_steps(a: float) -> dict[str, OffloadOptions]:
    """SMoE, a part more in every step."""
    evict = studied(eviction="smoe_score")
    route = dataclasses.replace(evict, route="substitute", route_options={"a": a})
    fetch = dataclasses.replace(
        route, predictor="smoe_partial", predictor_options={"top_a": a}
    )
    assist = dataclasses.replace(fetch, assist="two_pointer")
    return dict(zip(STEPS[1:], (evict, route, fetch, assist), strict=True))


def policies(a: float, counts_LE: np.ndarray, _) -> dict[str, OffloadOptions]:
    """The bases and all steps."""
    return bases(counts_LE) | smoe_steps(a)


def time_in(
    bench: Bench,
    settings: BudgetSettings,
    policies: Callable[[float, np.ndarray, ModelConfig], dict[str, OffloadOptions]],
    history: Sequence[dict],
) -> Timing:
    """Every policy at every batch size and budget.

    Args:
      policies: by name, of a, int [L, E] past choices of each expert, and the model.
      history: what was seen before.
    """
    config = bench.config
    counts_LE = count_history(history, config.num_layers, config.moe.num_experts)
    cases = [
        Case(policy, budget, batch, options)
        for batch in settings.batches
        for budget in settings.budgets
        for policy, options in policies(settings.a, counts_LE, config).items()
    ]
    return run_cases(bench, cases, settings, history)


def measure(settings: BudgetSettings, rows: Rows) -> None:
    """Times the ablation, and watches which choices had to be brought."""
    with Bench(settings.checkpoint, settings=settings) as bench:
        history = past_sequences(bench, settings)
        timing = time_in(bench, settings, policies, history)
        watched = {
            case.key: watch(bench, timing, case, settings, history)
            for case in (one.case for one in timing.timed.values())
            if case.batch == settings.batches[0]
        }
        timing.tell(rows, bench.model, settings)
    tell(rows, timing, watched)


def tell(rows: Rows, timing: Timing, watched: Mapping[tuple, Brought]) -> None:
    """Adds what was watched, by key of the case, and whether the base whose absent
    experts the host computes beats the whole of SMoE in every round."""
    rows.about["baselines"] = ["resident", "static cache from earlier prompts", ON_CPU]
    for key, seen in watched.items():
        rows("choices", *key, **seen._asdict())
    for (policy, *at), one in timing.timed.items():
        if policy == ON_CPU:
            wins = all(np.less(one.tpot_s, timing["+BA", *at].tpot_s))
            rows("rounds", *at, cpu_wins=wins)


def watch(
    bench: Bench, timing: Timing, case: Case, settings: BudgetSettings, history
) -> Brought:
    """Which choices a case had to bring, over the rounds' prompts."""
    options = linked(case.options, case.budget, timing.ready.link)
    engine = bench.engine(options, case.batch, with_trace=True)
    engine.predictor_run.learn(history)
    warm = timing.ready.pool.rows[settings.history :]  # of `prepare`, never measured
    generate(engine, warm[: case.batch], settings.new_tokens)
    engine.reset_records()
    for prompts in timing.ready.rounds:
        generate(engine, prompts[: case.batch], settings.new_tokens)
    return brought(engine.trace.trace(), settings.a)


def derive(tables: Tables) -> dict[str, Any]:
    """Changes by step, and what figures 15, 16, 18 and table I show.

    `step`: mean over budgets, from the step before. `at`: of the middle budget and the
    first batch size. `table1`: what the base's step goes to; waiting counts by what was
    brought.
    """
    timing, choices = tables["timing"], tables["choices"]
    steps = timing[timing.policy.isin(STEPS)]
    step = pd.DataFrame(
        {
            name: changes(steps, measure, STEPS, "batch budget")
            .groupby(level="batch", sort=False)
            .mean()
            .stack()
            for name, measure in (("tpot", "tpot_ms"), ("hit", "hit_ratio"))
        }
    ).reset_index()
    budgets, batch = steps.budget.unique(), steps.batch.iloc[0]
    budget = budgets[len(budgets) // 2]
    at = steps.merge(choices, on=["policy", "budget", "batch"])
    at = at[(at.budget == budget) & (at.batch == batch)]
    base = at.iloc[0]
    waited = base.wait_ms / base.tpot_ms
    low = waited * base.low_of_absent
    return {
        "step": step,
        "batch": batch,
        "budget": budget,
        "budgets": budgets,
        "at": at[["policy", *SHOWN]],
        "low": base.low,
        "table1": {"low": low, "top": waited - low, "rest": 1 - waited},
        "cpu_wins": tables["rounds"].cpu_wins.sum(),
        "settings": len(tables["rounds"]),
    }


FRAMES = {
    "timing": TIMING,
    "layer": LAYER,
    "choices": frame("policy budget batch", **dict.fromkeys(Brought._fields, "1")),
    "rounds": frame("budget batch", "cpu_wins"),
}
STUDY = Study(
    "smoe_fig14",
    BudgetSettings,
    measure,
    FRAMES,
    derive,
    check=check_prompts,
    inline=True,
)
