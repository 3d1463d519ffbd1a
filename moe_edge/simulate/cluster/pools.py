"""The routing of requests: rows of one long made-up or recorded text a domain.

A request reads its routing from consecutive rows of its domain's pool, from a row drawn
by the run's seed on, round the end. So millions of tokens need no memory of their own.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.workload.requests import Request
from moe_edge.workload.routing_model import RoutingModel
from moe_edge.workload.traces import Trace


class RoutingPools:
    """Routing of every domain.

    Attributes:
      domains: names.
      num_layers, num_experts, top_k: of the model.
    """

    def __init__(self, ids: Mapping[str, np.ndarray], num_experts: int):
        """Args: ids: for each domain expert ids [T, L, K], every token K different."""
        self.domains = tuple(ids)
        _, self.num_layers, self.top_k = next(iter(ids.values())).shape
        self.num_experts = num_experts
        base_L1 = np.arange(self.num_layers, dtype=np.int32)[:, None] * num_experts
        self._cells = {
            domain: (ids_TLK + base_L1).reshape(len(ids_TLK), -1)
            for domain, ids_TLK in ids.items()
        }

    @property
    def num_blocks(self) -> int:
        return self.num_layers * self.num_experts

    @classmethod
    def sampled(
        cls, model: RoutingModel, domains: Sequence[str], seed: int, tokens: int
    ) -> "RoutingPools":
        """Pools of so many tokens drawn from a routing model."""
        ids = {
            domain: model.sample(domain, tokens, rng=np.random.default_rng([seed, i]))
            for i, domain in enumerate(dict.fromkeys(domains))
        }
        return cls(ids, model.num_experts)

    @classmethod
    def recorded(cls, trace: Trace, domains: Sequence[str]) -> "RoutingPools":
        """The same pool for all domains: the complete tokens of a trace in its order.

        Raises:
          ConfigError: no step passed every layer with K experts a token.
        """
        ids_TLK = complete_tokens(trace)
        if not len(ids_TLK):
            raise ConfigError(
                "no step of the route trace passed every layer with "
                f"{trace.top_k} experts a token"
            )
        return cls(dict.fromkeys(domains, ids_TLK), trace.num_experts)

    def rows(self, requests: Sequence[Request], seed: int) -> np.ndarray:
        """int64 [R]: the row of its pool at which each request begins."""
        rng = np.random.default_rng([seed, 1])
        sizes = {domain: len(cells) for domain, cells in self._cells.items()}
        most = np.array([sizes[request.domain] for request in requests])
        return (rng.random(len(requests)) * most).astype(np.int64)

    def cells(self, domain: str, row: int, tokens: int) -> np.ndarray:
        """int32 [T, L * K]: layer * E + expert of so many tokens from `row` on."""
        pool = self._cells[domain]
        start = row % len(pool)
        if start + tokens <= len(pool):
            return pool[start : start + tokens]
        return pool[(start + np.arange(tokens)) % len(pool)]

    def frequency(self, domain: str) -> np.ndarray:
        """float64 [L, E]: share of a layer's calls, over the whole pool."""
        check_known("routing domain", domain, self._cells)
        cells = self._cells[domain]
        counts_X = np.bincount(cells.reshape(-1), minlength=self.num_blocks)
        shape = (self.num_layers, self.num_experts)
        return counts_X.reshape(shape) / (len(cells) * self.top_k)


def complete_tokens(trace: Trace) -> np.ndarray:
    """int32 [T, L, K]: tokens of the steps in which every layer routed equally many.

    The n-th row of a step at each layer is taken to be the same token.
    """
    layers, layer_T = np.unique(trace.layer, return_inverse=True)
    steps, step_T = np.unique(trace.step, return_inverse=True)
    rows_SL = np.zeros((len(steps), len(layers)), np.int64)
    np.add.at(rows_SL, (step_T, layer_T), 1)
    full_S = (rows_SL == rows_SL[:, :1]).all(axis=1)
    np.logical_and.at(full_S, step_T, (trace.ids_TK >= 0).all(axis=1))
    rows = np.flatnonzero(full_S[step_T])
    rows = rows[np.lexsort((layer_T[rows], step_T[rows]))]
    # How many rows of the same step and layer stand before each.
    keys = step_T[rows] * len(layers) + layer_T[rows]
    token = np.arange(len(rows)) - np.searchsorted(keys, keys)
    rows = rows[np.lexsort((layer_T[rows], token, step_T[rows]))]
    return trace.ids_TK[rows].reshape(-1, len(layers), trace.top_k)
