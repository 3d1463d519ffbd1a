"""SMoE, figure 14: what each part of SMoE adds to a static cache.

Every step keeps what the one before it has:
base: a static cache of the experts that earlier prompts used most; an absent expert
travels on demand and leaves first;
+CE: eviction by mean gate score; +CR: substitution of low-score experts; +Pre:
prefetching of predicted top-score experts; +BA: the host computes absent experts
beside transfers, by two pointers (CPU-assisted scheduling, which balances).

The paper's base is llama.cpp with some experts kept on the GPU; it names neither
which nor how absent ones are computed in the later steps. llama.cpp computes
absent experts on the CPU; `base on CPU` is that, by Fiddler's rule. Here the CPU is
the device too, so it is kept apart: each step from `base` changes one thing only.
"""

import dataclasses

import numpy as np

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.cases import Case, count_history, past_sequences
from moe_edge.studies.engines import Bench
from moe_edge.studies.smoe.settings import LIMITS, Findings, Settings, claim
from moe_edge.studies.study import mean_change, median_and_spread
from moe_edge.studies.timed_cases import Timing, run_cases

STEPS = ("base", "+CE", "+CR", "+Pre", "+BA")
ON_CPU = "base on CPU"
# Section VI-C, batch 1, means over settings: changes of TPOT and of the cache ratio.
PAPER = {
    "+CE": (-0.08, 0.11),
    "+CR": (-0.20, 0.60),
    "+Pre": (-0.14, 0.12),
    "+BA": (-0.34, -0.03),
}
WHY = (
    "The paper's changes are over three models of 16 to 57 B parameters on GPUs whose "
    "PCIe is 10 to 100 times slower than an expert's compute; here a transfer is 2 "
    "layers of compute. Our base keeps the experts that other prompts used most, and "
    "the slots are one pool over all layers. Host-computed experts cost the same cores "
    "as the model."
)


def bases(profile_LE: np.ndarray) -> dict[str, OffloadOptions]:
    """What SMoE is added to: a static cache of the experts that were used most."""
    base = OffloadOptions(
        eviction="static_oracle", eviction_options={"profile": profile_LE}
    )
    return {STEPS[0]: base, ON_CPU: dataclasses.replace(base, assist="fiddler")}


def smoe_steps(a: float) -> dict[str, OffloadOptions]:
    """The options of every step: each adds to the one before it."""
    evict = OffloadOptions(eviction="smoe_score")
    route = dataclasses.replace(evict, route="substitute", route_options={"a": a})
    fetch = dataclasses.replace(
        route, predictor="smoe_partial", predictor_options={"top_a": a}
    )
    assist = dataclasses.replace(fetch, assist="two_pointer")
    return dict(zip(STEPS[1:], (evict, route, fetch, assist), strict=True))


def is_exact(options: OffloadOptions) -> bool:
    """Whether tokens are the resident engine's, to the last bit of the logits."""
    return options.lossless and options.assist is None


def run(settings: Settings) -> tuple[dict, Findings]:
    """Measures the ablation; returns the model and the findings."""
    with Bench(settings.checkpoint) as bench:
        history, config = past_sequences(bench, settings), bench.config
        profile_LE = count_history(history, config.num_layers, config.moe.num_experts)
        cases = [
            Case(step, budget, batch, options, is_exact(options))
            for batch in settings.batches
            for budget in settings.budgets
            for step, options in (bases(profile_LE) | smoe_steps(settings.a)).items()
        ]
        timing = run_cases(bench, cases, settings, history)
    return bench.model, findings(timing, settings)


def changes(timing: Timing, settings: Settings, batch: int) -> dict[str, tuple]:
    """Per step: mean change of TPOT and of the cache ratio from the step before."""
    found = {}
    for old, new in zip(STEPS, STEPS[1:], strict=False):
        tpot, ratio = [], []
        for budget in settings.budgets:
            before, after = (timing.find(s, budget, batch) for s in (old, new))
            tpot.append((np.median(before.tpot_s), np.median(after.tpot_s)))
            ratio.append((np.median(before.hit_ratio), np.median(after.hit_ratio)))
        found[new] = mean_change(tpot), mean_change(ratio)
    return found


def findings(timing: Timing, settings: Settings) -> Findings:
    """The entry from what was measured."""
    by_batch = {b: changes(timing, settings, b) for b in settings.batches}
    first = settings.batches[0]
    parts = [
        f"{step} {100 * tpot:+.0f} % (paper {100 * PAPER[step][0]:+.0f} %)"
        for step, (tpot, _) in by_batch[first].items()
    ]
    rows = [row for one in timing.timed for row in one.rows()]
    rows += timing.resident_rows()
    for batch, found in by_batch.items():
        for step, (tpot, ratio) in found.items():
            n = len(settings.budgets)
            name = f"change from the step before, batch {batch}"
            rows.append(metric(step, f"TPOT {name}", tpot, "1", n))
            rows.append(metric(step, f"cache ratio {name}", ratio, "1", n))
    entry = {
        "question": "What does each part of SMoE add to a static expert cache "
        "(SMoE fig. 14)?",
        "answer": f"Mean change of TPOT over budgets {', '.join(settings.budgets)} at "
        f"batch {first}: {'; '.join(parts)}.",
        "kind": "emulated",
        "workload": timing.ready.workload(settings),
        "metrics": rows,
        "baselines": ["resident", "static cache from earlier prompts", ON_CPU],
        "checks": timing.checks(),
        "limits": [*LIMITS, WHY],
        "paper_claim": claim(
            "SMoE, section VI-C and fig. 14: change of (TPOT, cache ratio) by step",
            PAPER,
            by_batch[first],
            WHY,
        ),
    }
    summary = {step: tpot for step, (tpot, _) in by_batch[first].items()}
    return Findings(
        entry=entry,
        plot=lambda path: plot(path, timing, settings),
        summary={"tpot_change": summary},
    )


def plot(path, timing: Timing, settings: Settings, policies=(*STEPS, ON_CPU)) -> None:
    """TPOT and cache ratio of every policy, by budget; a column a batch size."""
    panels = []
    for measure, scale in (("tpot_s", 1e3), ("hit_ratio", 1)):
        for batch in settings.batches:
            series, spreads = {}, {}
            for policy in policies:
                found = [
                    median_and_spread(
                        getattr(timing.find(policy, budget, batch), measure)
                    )
                    for budget in settings.budgets
                ]
                series[policy] = [scale * value for value, _ in found]
                spreads[policy] = [scale * spread[1] for _, spread in found]
            is_time = measure == "tpot_s"
            resident_ms = 1e3 * median_and_spread(timing.resident_s[batch])[0]
            panels.append(
                Panel(
                    f"batch {batch}",
                    "TPOT (ms)" if is_time else "cache ratio",
                    list(settings.budgets),
                    series,
                    spreads,
                    x_label="experts on the device",
                    level=("resident", resident_ms) if is_time else None,
                )
            )
    bar_panels(
        path,
        panels,
        title="Time per step and cache ratio, emulated link (bars: median of rounds)",
        columns=len(settings.batches),
    )
