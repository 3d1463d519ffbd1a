"""A shadow on one machine, beside LRU with the same bytes of device memory.

OD-MoE runs its shadow on a node of its own. Here it takes memory from the slots and
time from the model; in return the layered engine knows all experts of a token ahead.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moe_edge.bench.cases import Case, past_sequences
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import round_ratios
from moe_edge.bench.timed_cases import Timing, run_cases
from moe_edge.engine.session import cache_bytes
from moe_edge.metrics.frames import Rows, Tables, median
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


def measure(settings: OneMachineSettings, rows: Rows) -> None:
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
        tell(rows, cases, timed, shares, ratios)
        first = next(iter(timed.values()))
        links = {f"{f:g}x": at.ready.link.describe() for f, at in timed.items()}
        workload = first.ready.workload(settings) | {"links": links}
    rows.about |= {"model": bench.model, "workload": workload, "kind": "emulated"}
    rows.about["baselines"] = [LRU, GATE]


def tell(
    rows: Rows,
    cases: Mapping[tuple[str, str], Case],
    timed: Mapping[float, Timing],
    shares: Mapping[str, float],
    token_times: Mapping[str, Sequence[float]],
) -> None:
    """Adds all cases by link, and the shadows; `token_times`: of `token_ratios`."""
    for precision, share in shares.items():
        times = median(token_times[precision])
        rows("shadows", precision, bytes_share=share, token_over=times)
    for factor, timing in timed.items():
        for name, holds in timing.checks().items():
            rows.checks[f"{name}, link {factor:g}x"] = holds
        for (policy, budget), case in cases.items():
            one, base = timing[case.key], timing[cases[LRU, budget].key]
            more = {}
            if policy != LRU:
                more["over_lru"] = median(round_ratios(one.tpot_s, base.tpot_s))
            figures = one.measures()
            kept = {name: figures[name] for name in ("tpot_ms", "hit_ratio")}
            rows("cases", policy, budget, factor, **kept, **more)


def derive(tables: Tables) -> dict[str, Any]:
    """Shadows over LRU at best and at worst, with their bytes counted and free."""
    cases, shadows = tables["cases"], tables["shadows"].set_index("precision")
    of_shadows = cases[cases.policy.str.contains("shadow") & cases.over_lru.notna()]
    is_free = of_shadows.policy.str.contains("free")
    counted, free = of_shadows[~is_free], of_shadows[is_free]
    checks = {}
    for precision in shadows.index.intersection([*LIMITS]):
        limit = LIMITS[precision]
        check = f"{precision}: a token takes <= {limit} times the resident model's"
        checks[check] = bool(shadows.token_over[precision] <= limit)
    found: dict[str, Any] = {"free_best": free.over_lru.min(), "checks": checks}
    if len(counted):
        found["best"] = counted.loc[counted.over_lru.idxmin()].to_dict()
        found["worst"] = counted.over_lru.max()
    cases["link_name"] = cases.link.map("link {:g}x".format)
    return found | {"shown": cases}
