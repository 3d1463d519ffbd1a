"""A shadow on one machine, beside LRU with the same bytes of device memory.

OD-MoE runs its shadow on a node of its own. Here it takes memory from the slots and
time from the model; in return the layered engine knows all experts of a token ahead.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.bench import cases as study_cases
from moe_edge.bench.cases import Case, past_sequences
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import median_metric, median_panel, round_ratios
from moe_edge.bench.timed_cases import Timing, run_cases
from moe_edge.engine.session import cache_bytes
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.od_moe.studies.shadows import shadow_in
from moe_edge.papers.od_moe.studies.studies import OneMachineSettings
from moe_edge.papers.od_moe.studies.token_time import LIMITS, token_ratios

LRU, GATE = "lru", "lru, stale_gate"
MIN_SLOTS = 2
PREFETCH_LIMIT = 24


def shadow_name(precision: str, is_free: bool = False) -> str:
    """Of a case; a control's shadow takes no slots away."""
    return f"lru, {precision} shadow" + (", its bytes free" if is_free else "")


def cases_of(
    settings: OneMachineSettings, shadow_share: Mapping[str, float], slot_share: float
) -> dict[tuple[str, str], Case]:
    """Every case by (policy, device memory that it may take in all).

    Args:
      shadow_share: by precision, bytes of the shadow over those of all experts.
      slot_share: of one slot, likewise.
    """
    cases = {}
    for budget in settings.budgets:
        whole = float(budget.rstrip("%")) / 100
        shares = {LRU: whole, GATE: whole}
        options = {LRU: studied(), GATE: studied(predictor="stale_gate")}
        for precision, taken in shadow_share.items():
            shadow = studied(
                predictor="shadow",
                predictor_options={"precision": precision},
                horizon=settings.horizon,
                prefetch_limit=PREFETCH_LIMIT,
            )
            free = shadow_name(precision, is_free=True)
            shares[free], options[free] = whole, shadow
            if whole - taken >= MIN_SLOTS * slot_share:
                name = shadow_name(precision)
                shares[name], options[name] = whole - taken, shadow
        for policy, share in shares.items():
            memory = f"{100 * share:.2f}%"
            cases[policy, budget] = Case(policy, memory, 1, options[policy])
    return cases


def run(settings: OneMachineSettings) -> Findings:
    """Times all cases at every link."""
    with Bench(settings.checkpoint) as bench:
        store, tokens = bench.store, settings.prompt_tokens + settings.new_tokens
        experts_bytes = (
            store.block_bytes * len(store.moe_layers) * bench.config.moe.num_experts
        )
        shadow_bytes = {
            precision: shadow_in(bench, precision).weights.num_bytes
            + cache_bytes(bench.config, 1, tokens)
            for precision in settings.precisions
        }
        shares = {name: taken / experts_bytes for name, taken in shadow_bytes.items()}
        cases = cases_of(settings, shares, store.block_bytes / experts_bytes)
        history, timed = past_sequences(bench, settings), {}
        for factor in settings.link_factors:
            at_link = dataclasses.replace(settings, link_factor=factor)
            timed[factor] = run_cases(bench, list(cases.values()), at_link, history)
        prompt = next(iter(timed.values())).ready.rounds[0][0]
        ratios = token_ratios(
            bench, prompt, settings.new_tokens, settings.precisions, settings.rounds
        )
        return findings(bench.model, cases, timed, shares, ratios, settings)


def findings(
    model: dict,
    cases: Mapping[tuple[str, str], Case],
    timed: Mapping[float, Timing],
    shares: Mapping[str, float],
    token_times: Mapping[str, Sequence[float]],
    settings: OneMachineSettings,
) -> Findings:
    """The entry; `token_times`: of `token_ratios`."""
    rows, ratios, checks = [], {}, {}
    for precision, share in shares.items():
        policy, name = f"{precision} shadow", "bytes over those of all experts"
        rows.append(metric(policy, name, share, "1"))
        name, times = (
            "its token's time over the resident model's",
            token_times[precision],
        )
        rows.append(median_metric(policy, name, times, "1"))
        if (limit := LIMITS.get(precision)) is not None:
            check = f"{precision}: a token takes <= {limit} times the resident model's"
            checks[check] = float(np.median(times)) <= limit
    for factor, timing in timed.items():
        checks |= {
            f"{name}, link {factor:g}x": ok for name, ok in timing.checks().items()
        }
        for (policy, budget), case in cases.items():
            one, base = timing[case.key], timing[cases[LRU, budget].key]
            at = f"{budget} in all, link {factor:g}x"
            rows.append(median_metric(policy, f"TPOT, {at}", one.tpot_s, "ms", 1e3))
            hits = one.hit_ratio
            rows.append(median_metric(policy, f"cache ratio, {at}", hits, "1"))
            ratio = round_ratios(one.tpot_s, base.tpot_s)
            if policy != LRU:
                name = f"TPOT over LRU's, {at}"
                rows.append(median_metric(policy, name, ratio, "1"))
            ratios[policy, budget, factor] = rows[-1]["value"]
    first = next(iter(timed.values()))
    return Findings(
        answer=sentence(ratios),
        model=model,
        workload=first.ready.workload(settings)
        | {
            "links": {
                f"{factor:g}x": timing.ready.link.describe()
                for factor, timing in timed.items()
            }
        },
        metrics=rows,
        limits=[
            *study_cases.LIMITS[:2],
            "The shadow runs on the cores that run the model, before each token.",
            "JAX runs programs in a thread of its own here, as a shadow wants it: LRU "
            "without one would be up to 20 % faster in the calling thread.",
            "Other work ran on the machine: times differ from round to round, so read "
            "ratios within rounds, and not ratios near 1.",
            study_cases.LIMITS[2],
        ],
        kind="emulated",
        checks=checks,
        baselines=[LRU, GATE],
        ours={
            f"{policy}, {budget}, link {factor:g}x": value
            for (policy, budget, factor), value in ratios.items()
            if policy != LRU
        },
        plot=lambda path: plot(path, cases, timed, settings),
        summary={"over_lru": {", ".join(map(str, k)): v for k, v in ratios.items()}},
    )


def sentence(ratios: Mapping[tuple[str, str, float], float]) -> str:
    """The answer, of TPOT over LRU's by (policy, budget, link factor)."""
    shadows = {key: ratio for key, ratio in ratios.items() if "shadow" in key[0]}
    free = {key: ratio for key, ratio in shadows.items() if "free" in key[0]}
    counted = {key: ratio for key, ratio in shadows.items() if key not in free}
    words = "No shadow leaves room for slots"
    if counted:
        policy, budget, factor = best = min(counted, key=counted.get)
        words = (
            f"With its bytes counted a shadow takes {counted[best]:.2f} times LRU's "
            f"time per token at best ({policy.split()[1]}, {budget}, link {factor:g}x) "
            f"and {max(counted.values()):.2f} at worst"
        )
    return f"{words}; with its bytes free {min(free.values()):.2f} at best."


def plot(path, cases, timed: Mapping[float, Timing], settings) -> None:
    """A panel a budget: bars of all cases at every link."""
    panels = []
    for budget in settings.budgets:
        rounds_of = {
            policy: [timing[case.key].tpot_s for timing in timed.values()]
            for (policy, at), case in cases.items()
            if at == budget
        }
        title = f"{budget} of the experts' bytes in all"
        links = [f"link {factor:g}x" for factor in timed]
        panel = median_panel(title, "ms a token", links, rounds_of, 1e3, log=True)
        panels.append(panel)
    draw_panels(path, panels, title="A shadow on one machine (emulated links)")
