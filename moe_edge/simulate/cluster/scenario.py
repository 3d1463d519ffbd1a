"""What is simulated: a model on a cluster, its requests, and the methods by name."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import check_known
from moe_edge.hardware.cost_model import CostModel
from moe_edge.hardware.models import ModelShape
from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.place.placer import ALONE, METHODS, Placer, get_placer
from moe_edge.place.problem import Problem, Traffic
from moe_edge.schedule.to_idle import ToIdle
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.offload import OffloadPolicy
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.workload.requests import Request


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One workload on one cluster.

    Attributes:
      shape: of the model.
      cost_model: of the cluster.
      requests: in order of arrival.
      pools: their routing.
      frequency_NLE: what placers are told: for each server its share of all tokens
        times the frequencies of the domain it was placed for.
      lengths_N2: mean prompt and answer tokens at each server.
    """

    shape: ModelShape
    cost_model: CostModel
    requests: Sequence[Request]
    pools: RoutingPools
    frequency_NLE: np.ndarray
    lengths_N2: np.ndarray

    @property
    def requests_per_s(self) -> tuple[float, ...] | None:
        """Mean rate of arrival at each server; None if all come at once."""
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        if span_s <= 0:
            return None
        servers = [request.server for request in self.requests]
        count_N = np.bincount(servers, minlength=len(self.lengths_N2))
        return tuple((np.maximum(count_N, 1) / span_s).tolist())

    def problem(self, seed: int = 0, cache_share: float = 0.0) -> Problem:
        """What placers get: the memory that a cache leaves, and this traffic."""
        offload = OffloadPolicy(share=cache_share) if cache_share else None
        slots = self.cost_model.cluster.slots(self.shape.block.num_bytes)
        prompt_N, output_N = (tuple(column.tolist()) for column in self.lengths_N2.T)
        return Problem(
            self.frequency_NLE,
            slots if offload is None else offload.placed(slots),
            self.cost_model,
            seed=seed,
            traffic=Traffic(self.shape.top_k, prompt_N, output_N, self.requests_per_s),
        )

    def loop(
        self,
        method: str | Placer | type[Placer],
        options: LoopOptions | None = None,
        *,
        seed: int = 0,
        period_s: float = 0.0,
        cache_share: float = 0.0,
        **migration: Any,
    ) -> ClusterLoop:
        """A run of one method, ready to go.

        Args:
          method: a placer, or the name of one of METHODS.
          options: of the loop; None: its defaults.
          seed: of placements and of where requests read their routing.
          period_s: of migration; 0 keeps the first placement, as do placers that no
            statistics change (Prism, section IV-B, figure 6).
          cache_share: above 0 a server loads the blocks that it lacks from host memory
            into so much of its GPUs' memory, instead of asking other servers.
          **migration: further options of `MigrationPolicy`.
        """
        is_alone = isinstance(method, str) and method in ALONE
        if isinstance(method, str):
            check_known("method", method, METHODS)
        options = LoopOptions() if options is None else options
        schedule = placement = moving = None
        share = 1.0 if is_alone else cache_share
        offload = OffloadPolicy(share=share) if share else None
        if is_alone and ALONE[method]:
            reach_s = functools.partial(self.cost_model.send_s, tokens=1)
            schedule = ToIdle(options.max_batch, reach_s)
        if not is_alone:
            placer, problem = get_placer(method), self.problem(seed, cache_share)
            placement = placer.solve(problem)
            if period_s and placer.follows_statistics:
                moving = MigrationPolicy(
                    period_s, placer=placer, traffic=problem.traffic, **migration
                )
        return ClusterLoop(
            *(self.requests, placement, self.cost_model, self.pools, options, seed),
            schedule=schedule,
            migration=moving,
            offload=offload,
        )
