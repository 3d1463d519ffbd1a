"""Prism, figures 5 and 6: what remote calls cost, and who has few of them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.plots_offload import Panel, line_panels
from moe_edge.metrics.study_prism_runs import (
    EPLB,
    LIMITS,
    OPTIMUM,
    OURS,
    PRISM,
    PrismFindings,
    PrismSettings,
    cases_of,
    median_row,
    prism_claim,
    serve,
    shape_entry,
    workload_entry,
)
from moe_edge.metrics.study_prism_tables import INTERVAL_S, TABLE_2
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.simulate.cluster_case import Case
from moe_edge.simulate.cluster_loop import ClusterLoop
from moe_edge.simulate.cluster_report import ClusterResult, report
from moe_edge.simulate.cluster_state import LoopOptions

MODELS = ("deepseek_v2_lite", "mixtral_8x7b")
GAP_S = 1000.0  # between requests of figure 5: never two at a time
WHY_5 = (
    "The figure has no numbers in its text. The paper's remote expert is loaded into "
    "GPU memory on arrival; here it is resident there, so a call is its messages, a "
    "queue and arithmetic. All of a layer's calls to a server share a message: the "
    "first remote expert costs most, further ones little more than their bytes."
)
WHY_6 = (
    "The figure has no numbers in its text. First placed for general text (c4), as the "
    "paper's was for other data; the paper's rule of migration: every 5 minutes, all "
    "statistics kept, no hysteresis. Uniform and Redundance never migrate (IV-B)."
)


def split_placement(case: Case, share: float, seed: int) -> Placement:
    """Server 0 lacks a random `share` of every layer's blocks, the others none.

    Memory is no limit here. Blocks of a server go round its GPUs.
    """
    shape = case.shape
    gpus = [len(server.gpus) for server in case.cost_model.cluster.servers]
    blocks_E = np.arange(shape.num_experts)
    gpu_NLE = np.stack(
        [np.tile(blocks_E % count, (shape.num_layers, 1)) for count in gpus]
    )
    rng = np.random.default_rng([seed, 5])
    order_LE = rng.random((shape.num_layers, shape.num_experts)).argsort(axis=1)
    away = round(share * shape.num_experts)
    gpu_NLE[0][order_LE < away] = ABSENT
    return Placement(gpu_NLE)


def alone(case: Case) -> Case:
    """Only the requests of server 0, far enough apart to find everything idle."""
    mine = [request for request in case.requests if request.server == 0]
    apart = [
        dataclasses.replace(request, id=number, arrival_s=GAP_S * number)
        for number, request in enumerate(mine)
    ]
    return dataclasses.replace(case, requests=apart)


def layer_seconds(case: Case, share: float, seed: int) -> tuple[float, float]:
    """Mean time of a layer, and the share of computations that were remote."""
    placement = split_placement(case, share, seed)
    options = LoopOptions()
    loop = ClusterLoop(
        case.requests, placement, case.cost_model, case.pools, options, seed
    )
    loop.run()
    found = report(loop)
    layers = found.steps * case.shape.num_layers
    return float(found.latency_R.sum()) / layers, 1 - found.local_ratio


def run_fig5(settings: PrismSettings) -> tuple[dict, PrismFindings]:
    """Time of a layer over the share of experts that are remote."""
    found: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}
    shapes, first = [], None
    for model in MODELS:
        for tokens in settings.tokens:
            fixed = {"input_tokens": tokens, "output_tokens": 1}
            cases = [(s, alone(c)) for s, c in cases_of(settings, model=model, **fixed)]
            first = first or cases[0][1]
            found[model, tokens] = [
                [layer_seconds(case, share, seed) for seed, case in cases]
                for share in settings.remote_shares
            ]
            print(f"figure 5: {model}, {tokens} tokens", flush=True)
        shapes.append(cases[0][1].shape)
    rows, times, sentences, ours = [], {}, [], {}
    for (model, tokens), by_share in found.items():
        at = f"{model}, {tokens} tokens"
        times[model, tokens] = [np.array(pairs)[:, 0] for pairs in by_share]
        for share, pairs in zip(settings.remote_shares, by_share, strict=True):
            name = f"time of a layer, {at}, {share:.0%} of experts remote"
            rows.append(median_row("all", name, 1e3 * np.array(pairs)[:, 0], "ms"))
            name = f"remote computations, {at}, {share:.0%} of experts remote"
            rows.append(median_row("all", name, np.array(pairs)[:, 1], "1"))
        low, high = (float(np.median(times[model, tokens][i])) for i in (0, -1))
        ours[at] = [
            round(1e3 * float(np.median(seconds)), 4)
            for seconds in times[model, tokens]
        ]
        sentences.append(f"{at}: {1e3 * low:.2f} to {1e3 * high:.2f} ms")
    rising = all(
        (np.diff([float(np.median(x)) for x in values]) > 0).all()
        for values in times.values()
    )
    ends = settings.remote_shares[0], settings.remote_shares[-1]
    entry = {
        "question": "What do remote experts cost a layer (Prism, figure 5)?",
        "answer": f"Time of a layer with {ends[0]:.0%} to {ends[1]:.0%} of its experts "
        f"remote, nothing else running: {'; '.join(sentences)}.",
        "workload": workload_entry(
            settings,
            first,
            tokens=list(settings.tokens),
            remote_shares=list(settings.remote_shares),
            models=list(MODELS),
            domain=first.requests[0].domain,
        ),
        "metrics": rows,
        "checks": {"a layer takes longer the more experts are remote": rising},
        "limits": [*LIMITS, "Memory is no limit here: the others hold every expert."],
        "paper_claim": prism_claim(
            "Prism, figure 5: time of a layer over the share of remote experts",
            {"trend": "rises sharply"},
            {"ms by share": ours, "shares": list(settings.remote_shares)},
            WHY_5,
        ),
    }
    panels = [
        Panel(
            model,
            "time of a layer (ms)",
            [100 * share for share in settings.remote_shares],
            {
                f"{tokens} tokens": [
                    1e3 * float(np.median(x)) for x in times[model, tokens]
                ]
                for tokens in settings.tokens
            },
            x_label="experts remote (%)",
            log=True,
        )
        for model in MODELS
    ]
    return shape_entry(*shapes), PrismFindings(
        entry=entry,
        plot=lambda path: line_panels(
            path, panels, title="Time of a layer over remote experts (simulated)"
        ),
        summary={"layer_ms": ours},
    )


def over_time(results: Sequence[ClusterResult]) -> list[float]:
    """Median over seeds of the local ratio in each window in which all have one."""
    windows = min(len(result.ratio_W) for result in results)
    table = np.stack([result.ratio_W[:windows] for result in results])
    full = windows - int(np.isnan(table).any(axis=0)[::-1].argmin())
    table = table[:, :full]
    return [
        float(np.median(column[~np.isnan(column)])) if (column == column).any() else 0.0
        for column in table.T
    ]


def share_between(result: ClusterResult, start_s: float, end_s: float) -> float:
    """Mean of the windows that lie between two times."""
    first, last = (int(round(t / result.window_s)) for t in (start_s, end_s))
    return float(np.nanmean(result.ratio_W[first:last]))


def run_fig6(settings: PrismSettings) -> tuple[dict, PrismFindings]:
    """Local ratio over time for every method, placed for other data at first."""
    rows, panels, curves, after, shapes, first = [], [], {}, {}, {}, None
    for workload, model in TABLE_2:
        label = f"{workload}, {model}"
        interval_s = INTERVAL_S[workload]
        cases = cases_of(
            settings,
            workload=workload,
            model=model,
            interval_s=interval_s,
            placed_for="c4",
        )
        first = first or cases[0][1]
        shapes[model] = cases[0][1].shape
        end_s = 0.9 * interval_s * settings.requests_per_server
        if end_s < 4 * settings.window_s:
            raise ConfigError(
                f"{settings.requests_per_server} requests a server last {end_s:g} s, "
                f"expected 4 windows of {settings.window_s:g} s; ask for more requests"
            )
        changed_s = min(2 * settings.period_s, end_s / 2)
        curves[label], after[label] = {}, {}
        for method in settings.methods:
            found = [
                serve(case, method, seed, settings.window_s, **settings.moving)
                for seed, case in cases
            ]
            curves[label][method] = over_time(found)
            for part, span in (
                ("before the first migration", (0.0, settings.period_s)),
                (f"from {changed_s:.0f} s on", (changed_s, end_s)),
            ):
                shares = [share_between(result, *span) for result in found]
                rows.append(
                    median_row(method, f"local ratio, {label}, {part}", shares, "1")
                )
            after[label][method] = round(float(np.median(shares)), 4)
            if "migrated" in found[0].facts:
                moved = [float(result.facts["migrated"]) for result in found]
                rows.append(median_row(method, f"migrations, {label}", moved, "1"))
        print(f"figure 6: {label}: {after[label]}", flush=True)
        panels.append(ratio_panel(label, curves[label], settings.window_s))
    entry = fig6_entry(settings, rows, after, first)
    text = json.dumps({"window_s": settings.window_s, "local_ratio": curves}, indent=1)
    return shape_entry(*shapes.values()), PrismFindings(
        entry=entry,
        plot=lambda path: line_panels(
            path, panels, title="Local compute ratio over time (simulated)"
        ),
        summary={"local_ratio_after": after},
        files={"curves.json": text + "\n"},
    )


def ratio_panel(
    title: str, curves: Mapping[str, Sequence[float]], window_s: float
) -> Panel:
    """Lines of local ratios over minutes."""
    count = max(len(curve) for curve in curves.values())
    return Panel(
        title,
        "computed locally",
        [round(window_s * (n + 0.5) / 60, 2) for n in range(count)],
        {
            method: [*curve, *[np.nan] * (count - len(curve))]
            for method, curve in curves.items()
        },
        x_label="minutes",
    )


def fig6_entry(settings, rows, after: Mapping[str, Mapping[str, float]], case) -> dict:
    """The entry's arguments, from local ratios after the first migrations."""
    shown = [m for m in (EPLB, PRISM, OPTIMUM, OURS) if m in settings.methods]
    sentences = [
        f"{label}: " + ", ".join(f"{m} {100 * by[m]:.1f} %" for m in shown)
        for label, by in after.items()
    ]
    below = [
        f"{label} ({by[PRISM]:.3f}, {max(by, key=by.get)} {max(by.values()):.3f})"
        for label, by in after.items()
        if PRISM in by and by[PRISM] < max(by.values())
    ]
    above = all(
        by[PRISM] >= max(v for m, v in by.items() if m not in (PRISM, OPTIMUM, OURS))
        for by in after.values()
        if PRISM in by and len(by) > 3
    )
    return {
        "question": "Who computes most at home, over time (Prism, figure 6)?",
        "answer": "Computed locally after the first migrations: "
        + "; ".join(sentences)
        + ". Prism's own placement is not the highest in: "
        + (", ".join(below) or "none")
        + ".",
        "workload": workload_entry(
            settings,
            case,
            placed_for="c4",
            window_s=settings.window_s,
            intervals_s=INTERVAL_S,
            **settings.moving,
        ),
        "metrics": rows,
        "baselines": [m for m in settings.methods if m not in (OPTIMUM, OURS, PRISM)],
        "checks": {"Prism is above the paper's baselines, after migrations": above},
        "limits": [
            *LIMITS,
            "Curves are medians over seeds, window by window; seeds do not all migrate "
            "at the same times.",
        ],
        "paper_claim": prism_claim(
            "Prism, figure 6: highest local ratio after migrations at 5 minutes "
            "(BigBench) and 10 minutes (MultiData)",
            {"trend": "Prism highest in all four panels"},
            {"local ratio after the first migrations": after},
            WHY_6,
        ),
    }
