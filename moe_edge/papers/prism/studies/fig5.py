"""Prism, figure 5: what remote experts cost a layer."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.settings import Share
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import Runs, cases_of
from moe_edge.place.plan import ABSENT, Placement
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.report import ClusterResult
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
    remote_shares: Sequence[Share] = (0.0, 0.25, 0.5, 0.75, 1.0)


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
    found = ClusterResult(loop)
    layers = found.steps * case.shape.num_layers
    return float(found.latency_R.sum()) / layers, 1 - found.local_ratio


def measure(settings: Figure5, rows: Rows) -> None:
    """Time of a layer over the share of experts that are remote."""
    used = []
    for model, tokens in itertools.product(MODELS, settings.tokens):
        fixed = {"input_tokens": tokens, "output_tokens": 1}
        cases = [(s, alone(c)) for s, c in cases_of(settings, model=model, **fixed)]
        used.append(cases[0][1])
        for share in settings.remote_shares:
            found = np.array([layer_seconds(c, share, seed) for seed, c in cases])
            layer_ms, remote = (
                of_seeds(values) for values in (1e3 * found[:, 0], found[:, 1])
            )
            rows("layers", model, tokens, share, layer_ms=layer_ms, remote=remote)
        print(f"figure 5: {model}, {tokens} tokens", flush=True)
    more = {"models": list(MODELS), "domain": used[0].requests[0].domain}
    tell(rows, settings, used, more)


def derive(tables: Tables) -> dict[str, Any]:
    """How much longer a layer takes from the least share to the largest."""
    layers = tables["layers"]
    ends = layers.groupby(["model", "tokens"], sort=False).layer_ms.agg(
        ["first", "last"]
    )
    ends["slowdown"] = ends["last"] / ends["first"]
    rising = layers.groupby(["model", "tokens"]).layer_ms.diff().dropna() > 0
    return {
        "ends": ends.reset_index(),
        "low": layers.share.min(),
        "high": layers.share.max(),
        "checks": {"a layer takes longer the more experts are remote": rising.all()},
    }


FRAMES = {"layers": frame("model tokens share", "layer_ms remote")}
STUDY = Study("prism_fig5", Figure5, measure, FRAMES, derive)
