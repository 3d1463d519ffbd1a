"""Prism, figure 5: what remote experts cost a layer."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from moe_edge.bench.study import Findings
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import Runs, cases_of
from moe_edge.papers.prism.studies.served import median_row
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.report import report
from moe_edge.simulate.cluster.scenario import Scenario

MODELS = ("deepseek_v2_lite", "mixtral_8x7b")
GAP_S = 1000.0  # between requests of figure 5: never two at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure5(Runs):
    """The size of the study.

    Attributes:
      tokens: of a request, prefilled at once.
      remote_shares: of a layer's experts, rising.
    """

    requests_per_server: int = 8
    tokens: Sequence[int] = (1, 32, 256)
    remote_shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)


def split_placement(case: Scenario, share: float, seed: int) -> Placement:
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


def alone(case: Scenario) -> Scenario:
    """Only the requests of server 0, far enough apart to find everything idle."""
    mine = [request for request in case.requests if request.server == 0]
    apart = [
        dataclasses.replace(request, id=number, arrival_s=GAP_S * number)
        for number, request in enumerate(mine)
    ]
    return dataclasses.replace(case, requests=apart)


def layer_seconds(case: Scenario, share: float, seed: int) -> tuple[float, float]:
    """Mean time of a layer, and the share of computations that were remote."""
    placement = split_placement(case, share, seed)
    parts = case.requests, placement, case.cost_model, case.pools, LoopOptions()
    loop = ClusterLoop(*parts, seed)
    loop.run()
    found = report(loop)
    layers = found.steps * case.shape.num_layers
    return float(found.latency_R.sum()) / layers, 1 - found.local_ratio


def measure(settings: Figure5) -> Findings:
    """Time of a layer over the share of experts that are remote."""
    metrics, ms_of, used = [], {}, []
    for model, tokens in itertools.product(MODELS, settings.tokens):
        fixed = {"input_tokens": tokens, "output_tokens": 1}
        cases = [(s, alone(c)) for s, c in cases_of(settings, model=model, **fixed)]
        used.append(cases[0][1])
        ms_of[model, tokens] = []
        for share in settings.remote_shares:
            found = np.array([layer_seconds(c, share, seed) for seed, c in cases])
            ms, remote = 1e3 * found[:, 0], found[:, 1]
            at = f"{model}, {tokens} tokens, {share:.0%} of experts remote"
            metrics.append(median_row("all", f"time of a layer, {at}", ms, "ms"))
            metrics.append(median_row("all", f"remote computations, {at}", remote, "1"))
            ms_of[model, tokens].append(float(np.median(ms)))
        print(f"figure 5: {model}, {tokens} tokens", flush=True)
    low, high = settings.remote_shares[0], settings.remote_shares[-1]
    slowdowns = [ms[-1] / ms[0] for ms in ms_of.values()]
    ours = {f"{m}, {n} tokens": ms for (m, n), ms in ms_of.items()}
    panels = [
        Panel(
            model,
            "time of a layer (ms)",
            [100 * share for share in settings.remote_shares],
            {f"{tokens} tokens": ms_of[model, tokens] for tokens in settings.tokens},
            x_label="experts remote (%)",
            log=True,
        )
        for model in MODELS
    ]
    return simulated(
        settings,
        used,
        answer=f"A layer with {high:.0%} instead of {low:.0%} of its experts remote "
        f"takes {min(slowdowns):.1f} to {max(slowdowns):.1f} times as long, nothing "
        "else running.",
        details=[
            f"{at}: {ms[0]:.2f} to {ms[-1]:.2f} ms a layer." for at, ms in ours.items()
        ],
        workload={"models": list(MODELS), "domain": used[0].requests[0].domain},
        metrics=metrics,
        checks={
            "a layer takes longer the more experts are remote": all(
                (np.diff(ms) > 0).all() for ms in ms_of.values()
            )
        },
        limits=["Memory is no limit here: the others hold every expert."],
        ours={
            "ms by share": {at: [round(x, 4) for x in ms] for at, ms in ours.items()},
            "shares": list(settings.remote_shares),
        },
        plot=lambda path: draw_panels(
            path, panels, title="Time of a layer over remote experts (simulated)"
        ),
        summary={"layer_ms": ours},
    )


STUDY = study_of(
    name="prism_fig5",
    question="What do remote experts cost a layer (Prism, figure 5)?",
    settings=Figure5,
    measure=measure,
    source="Prism, figure 5: time of a layer over the share of remote experts",
    paper={"trend": "rises sharply"},
    why="The figure has no numbers in its text. The paper's remote expert is loaded "
    "into GPU memory on arrival; here it is resident there, so a call is its messages, "
    "a queue and arithmetic. All of a layer's calls to a server share a message: the "
    "first remote expert costs most, further ones little more than their bytes.",
)
