"""Prism, figure 5: what remote experts cost a layer."""

import dataclasses

import numpy as np

from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.simulate.cluster.case import Case
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.report import report
from moe_edge.studies.prism.runs import (
    cases_of,
    median_row,
    prism_claim,
    shape_entry,
    workload_entry,
)
from moe_edge.studies.prism.settings import (
    LIMITS,
    PrismFindings,
    PrismSettings,
)

MODELS = ("deepseek_v2_lite", "mixtral_8x7b")
GAP_S = 1000.0  # between requests of figure 5: never two at a time
WHY = (
    "The figure has no numbers in its text. The paper's remote expert is loaded into "
    "GPU memory on arrival; here it is resident there, so a call is its messages, a "
    "queue and arithmetic. All of a layer's calls to a server share a message: the "
    "first remote expert costs most, further ones little more than their bytes."
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


def run(settings: PrismSettings) -> tuple[dict, PrismFindings]:
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
            WHY,
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
