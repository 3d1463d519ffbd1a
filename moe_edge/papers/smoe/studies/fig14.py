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
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from moe_edge.bench.cases import (
    AHEAD_LIMIT,
    INLINE_LIMIT,
    LIMITS,
    Case,
    count_history,
    linked,
    past_sequences,
)
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.rounds import median_metric, median_panel
from moe_edge.bench.study import Claim, Findings, Study, mean_change
from moe_edge.bench.timed_cases import TimedSettings, Timing, run_cases
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import metric
from moe_edge.model.config import ModelConfig
from moe_edge.papers.smoe.studies.score_classes import Brought, brought

STEPS = ("base", "+CE", "+CR", "+Pre", "+BA")
ON_CPU = "base on CPU"
# Section VI-C, batch 1, means over settings: changes of TPOT and of the cache ratio.
PAPER_TABLE1 = {"low-score loading": 0.42, "top-score loading": 0.29, "the rest": 0.29}
PAPER = {
    "+CE": (-0.08, 0.11),
    "+CR": (-0.20, 0.60),
    "+Pre": (-0.14, 0.12),
    "+BA": (-0.34, -0.03),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetSettings(TimedSettings):
    """A study of policies by budget; `TimedSettings` names the rest.

    Attributes:
      budgets: device memory of the experts.
      a: SMoE's margin, for routing and for what is prefetched.
    """

    rounds: int = 2
    budgets: Sequence[str] = ("15%", "25%", "50%")
    a: float = 0.2


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


def time_policies(
    settings: BudgetSettings,
    policies: Callable[[float, np.ndarray, ModelConfig], dict[str, OffloadOptions]],
) -> tuple[dict, Timing]:
    """`model` of the entry, and every policy at every batch size and budget.

    Args:
      settings: sizes.
      policies: by name, of a, int [L, E] past choices of each expert, and the model.
    """
    with Bench(settings.checkpoint) as bench:
        history = past_sequences(bench, settings)
        return bench.model, time_in(bench, settings, policies, history)


def time_in(bench: Bench, settings: BudgetSettings, policies, history) -> Timing:
    """`time_policies` on a bench, of what was seen before."""
    config = bench.config
    counts_LE = count_history(history, config.num_layers, config.moe.num_experts)
    cases = [
        Case(policy, budget, batch, options)
        for batch in settings.batches
        for budget in settings.budgets
        for policy, options in policies(settings.a, counts_LE, config).items()
    ]
    return run_cases(bench, cases, settings, history)


def run(settings: BudgetSettings) -> Findings:
    """Measures the ablation."""
    with Bench(settings.checkpoint) as bench:
        history = past_sequences(bench, settings)
        timing = time_in(bench, settings, policies, history)
        watched = {
            case.key: watch(bench, timing, case, settings, history)
            for case in (one.case for one in timing.timed.values())
            if case.batch == settings.batches[0]
        }
        return findings(bench.model, timing, watched, settings)


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


def changes(timing: Timing, budgets, batch: int) -> dict[str, tuple[float, float]]:
    """Per step: mean change of TPOT and of the cache ratio from the step before."""
    found = {}
    for old, new in itertools.pairwise(STEPS):
        pairs = [(timing[old, b, batch], timing[new, b, batch]) for b in budgets]
        found[new] = tuple(
            mean_change([(x.median(measure), y.median(measure)) for x, y in pairs])
            for measure in ("tpot_s", "hit_ratio")
        )
    return found


def shares_of_time(timing: Timing, key, seen: Brought) -> dict[str, float]:
    """Table I: what a step's time goes to. Waiting counts by what was brought."""
    waited = timing[key].median("wait_s") / timing[key].median("tpot_s")
    low = waited * seen.low_of_absent
    return dict(zip(PAPER_TABLE1, (low, waited - low, 1 - waited), strict=True))


def busy_rows(timing: Timing) -> list[dict]:
    """Metric rows: link, waiting and host of every case."""
    return [
        median_metric(
            one.case.policy, f"{name} a step, {one.case.setting}", s, "ms", 1e3
        )
        for one in timing.timed.values()
        for name, s in (
            ("link busy", one.link_s),
            ("waited", one.wait_s),
            ("host computes", one.host_s),
        )
    ]


def watched_rows(watched: dict[tuple, Brought]) -> list[dict]:
    """Metric rows: of each class the share that was brought."""
    return [
        metric(policy, f"{name}, {budget}, batch {batch}", value, "1")
        for (policy, budget, batch), seen in watched.items()
        for name, value in (
            ("top-score choices absent", seen.top_absent),
            ("low-score choices absent", seen.low_absent),
        )
    ]


def told_of_cpu(timing: Timing) -> str:
    """Where the base whose absent experts the host computes beats the whole of SMoE."""
    faster = [
        all(np.less(one.tpot_s, timing["+BA", budget, batch].tpot_s))
        for (policy, budget, batch), one in timing.timed.items()
        if policy == ON_CPU
    ]
    return (
        f"`{ON_CPU}`, lossless, takes less time than +BA in every round of "
        f"{sum(faster)} of {len(faster)} settings; here the host is the device."
    )


def told_of_figures(timing: Timing, watched, settings: BudgetSettings) -> list[str]:
    """Lines on table I and figures 15, 16 and 18, at the middle budget."""
    budget = settings.budgets[len(settings.budgets) // 2]
    batch = settings.batches[0]
    at = {step: (step, budget, batch) for step in STEPS}
    time = shares_of_time(timing, at["base"], watched[at["base"]])
    absent, busy = [], []
    for step, key in at.items():
        seen, one = watched[key], timing[key]
        absent.append(f"{step} {seen.top_absent:.2f} / {seen.low_absent:.2f}")
        link_ms, tpot_ms = (1e3 * one.median(name) for name in ("link_s", "tpot_s"))
        busy.append(f"{step} {link_ms:.1f} of {tpot_ms:.1f}")
    last = timing[at[STEPS[-1]]]
    host_ms, link_ms = (1e3 * last.median(name) for name in ("host_s", "link_s"))
    told = (f"{what} {s:.0%} ({PAPER_TABLE1[what]:.0%})" for what, s in time.items())
    return [
        f"The rest at {budget}, batch {batch}. Table I, what the base's step goes to "
        f"(the paper's): {', '.join(told)}.",
        "Figure 15, top-score / low-score choices that had to be brought: "
        f"{', '.join(absent)}; {watched[at['base']].low:.0%} of choices are low-score.",
        f"Figure 16, ms of a step in which the link is busy: {', '.join(busy)}.",
        f"Figure 18, with +BA: host {host_ms:.1f} ms a step, link {link_ms:.1f}.",
    ]


def findings(
    model: dict, timing: Timing, watched: dict, settings: BudgetSettings
) -> Findings:
    """The entry from what was measured.

    Args:
      watched: `Brought` of every case of the first batch size, by its key.
    """
    by_batch = {b: changes(timing, settings.budgets, b) for b in settings.batches}
    first, rows = settings.batches[0], timing.rows()
    rows += busy_rows(timing) + watched_rows(watched)
    tpot = {step: change for step, (change, _) in by_batch[first].items()}
    for batch, found in by_batch.items():
        at = f"change from the step before, batch {batch}"
        for step, pair in found.items():
            for what, change in zip(("TPOT", "cache ratio"), pair, strict=True):
                n = len(settings.budgets)
                rows.append(metric(step, f"{what} {at}", change, "1", n))
    told = (f"{s} {100 * t:+.0f} % ({100 * PAPER[s][0]:+.0f})" for s, t in tpot.items())
    return Findings(
        answer=f"Mean change of TPOT at batch {first} (in brackets the paper's): "
        f"{', '.join(told)}.",
        details=[
            f"Means are over budgets {', '.join(settings.budgets)}.",
            told_of_cpu(timing),
            *told_of_figures(timing, watched, settings),
        ],
        model=model,
        workload=timing.ready.workload(settings),
        metrics=rows,
        limits=[*LIMITS, AHEAD_LIMIT, INLINE_LIMIT],
        kind="emulated",
        baselines=["resident", "static cache from earlier prompts", ON_CPU],
        checks=timing.checks(),
        ours=by_batch[first],
        plot=lambda path: plot(path, timing, settings),
        summary={"tpot_change": tpot},
    )


def plot(path, timing: Timing, settings: BudgetSettings, policies=(*STEPS, ON_CPU)):
    """TPOT and cache ratio of every policy, by budget; a column a batch size."""
    panels = []
    for (measure, label, scale), batch in itertools.product(
        (("tpot_s", "TPOT (ms)", 1e3), ("hit_ratio", "cache ratio", 1)),
        settings.batches,
    ):
        resident_ms = 1e3 * float(np.median(timing.resident_s[batch]))
        rounds_of = {
            policy: [
                getattr(timing[policy, b, batch], measure) for b in settings.budgets
            ]
            for policy in policies
        }
        panels.append(
            median_panel(
                f"batch {batch}",
                label,
                list(settings.budgets),
                rounds_of,
                scale,
                x_label="experts on the device",
                level=("resident", resident_ms) if measure == "tpot_s" else None,
            )
        )
    draw_panels(
        path,
        panels,
        title="Time per step and cache ratio, emulated link (bars: median of rounds)",
        columns=len(settings.batches),
    )


STUDY = Study(
    name="smoe_fig14",
    question="What does each part of SMoE add to a static expert cache (SMoE figs. 14, "
    "15, 16, 18, table I)?",
    settings=BudgetSettings,
    measure=run,
    check=check_inputs,
    inline=True,
    claim=Claim(
        source="SMoE, section VI-C and fig. 14: change of (TPOT, cache ratio) by step",
        paper=PAPER | {"table I": PAPER_TABLE1},
        why="The paper's changes are over three models of 16 to 57 B parameters on "
        "GPUs whose PCIe is 10 to 100 times slower than an expert's compute; here a "
        "transfer is 2 layers of compute. Our base keeps the experts that other "
        "prompts used most, and the slots are one pool over all layers. Host-computed "
        "experts cost the same cores as the model.",
    ),
)
