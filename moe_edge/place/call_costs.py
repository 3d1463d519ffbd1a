"""What calls cost, as plain arrays: the adapter between a cost model and placers."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.checks import one_or_each
from moe_edge.hardware.cost_model import CallSizes, CostModel


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """Seconds of calls between servers and on them.

    Attributes:
      fixed_NM: of a call of one token from N to M and back, nothing in its way.
      byte_NM: that a byte occupies the link from N to M.
      sizes: bytes of calls and answers.
      local_N: of a call of one token on one of the server's GPUs.
      further_N: of a further token of the same call, as a share of `local_N`.
      gpus_N: how many GPUs compute side by side.
      one_link: whether all that a server sends leaves over one link.
    """

    fixed_NM: np.ndarray
    byte_NM: np.ndarray
    sizes: CallSizes
    local_N: np.ndarray
    further_N: np.ndarray
    gpus_N: np.ndarray
    one_link: bool = True

    @classmethod
    def of(cls, cost_model: CostModel, tokens: int = 256) -> "CallCosts":
        """Read off a cost model; `tokens`: of the larger call that gives slopes."""
        cluster = cost_model.cluster
        N = cluster.num_servers
        gpus_N = np.array([len(server.gpus) for server in cluster.servers])
        sizes = np.array([1, tokens])
        each = [
            [cost_model.compute_s(n, g, sizes) for g in range(gpus)]
            for n, gpus in enumerate(gpus_N)
        ]
        local_NB = np.array([np.mean(seconds_GB, axis=0) for seconds_GB in each])
        further_N = (local_NB[:, 1] / local_NB[:, 0] - 1) / (tokens - 1)
        alone_NM = cost_model.sends_s()
        fixed_NM = alone_NM + alone_NM.T + local_NB[:, 0] + cost_model.software_s()
        np.fill_diagonal(fixed_NM, 0.0)
        byte_NM = np.array(
            [[cluster.link(n, m).busy_s(1) for m in range(N)] for n in range(N)]
        )
        np.fill_diagonal(byte_NM, 0.0)
        return cls(
            fixed_NM=fixed_NM,
            byte_NM=byte_NM,
            sizes=cost_model.call_sizes,
            local_N=local_NB[:, 0],
            further_N=further_N,
            gpus_N=gpus_N,
            one_link=cluster.sharing == "egress",
        )

    @property
    def back_byte_NM(self) -> np.ndarray:
        """That a byte of M's answer to N occupies the link back: the share of one of
        the messages, where M answers from several GPUs."""
        return self.byte_NM.T / self.gpus_N

    def nearest(self) -> np.ndarray:
        """int64 [N, N - 1]: whom a server asks first, ties to the next in the ring."""
        N = len(self.fixed_NM)
        ring_NM = (np.arange(N) - np.arange(N)[:, None]) % N
        key_NM = np.where(ring_NM == 0, np.inf, self.fixed_NM.round(12))
        return np.lexsort((ring_NM, key_NM), axis=1)[:, : N - 1]


class Batch(NamedTuple):
    """Calls of one kind: `tokens` at once, `per_request` times a request.

    Either is one number for all servers or one a server.
    """

    tokens: Any  # a number or a list of them; once `by_server`, an array
    per_request: Any

    def by_server(self, servers: int) -> "Batch":
        """With arrays [N, 1, 1]."""
        columns = zip(self._fields, self, strict=True)
        return Batch(*(one_or_each(*c, servers)[:, None, None] for c in columns))


@dataclasses.dataclass
class View:
    """Callers to whom the other servers look alike, and how they look.

    Attributes:
      callers: servers.
      class_N: of every server, which sort of holder it is to them, nearest first.
      fixed_C: seconds of a call of one token to each sort.
    """

    callers: list[int]
    class_N: np.ndarray
    fixed_C: np.ndarray


def views_of(costs: CallCosts) -> list[View]:
    """Groups callers; a server's own place in its row is what its group sees there."""
    rows: list[np.ndarray] = []
    callers: list[list[int]] = []
    there_NM = costs.sizes.there(1, 1) * costs.byte_NM
    back_NM = costs.sizes.back(1, 1) * costs.back_byte_NM
    table_NM3 = np.stack([costs.fixed_NM, there_NM, back_NM], axis=2)
    for n, row_M3 in enumerate(table_NM3.round(12)):
        row_M3[n] = np.nan
        for group, known_M3 in zip(callers, rows, strict=True):
            both = ~(np.isnan(row_M3) | np.isnan(known_M3))
            if (row_M3[both] == known_M3[both]).all():
                np.copyto(known_M3, row_M3, where=np.isnan(known_M3))
                group.append(n)
                break
        else:
            rows.append(row_M3)
            callers.append([n])
    views = []
    for group, row_M3 in zip(callers, rows, strict=True):
        row_M3[np.isnan(row_M3)] = np.inf  # a lone caller's own place: the last class
        sorts_C3, class_N = np.unique(row_M3, axis=0, return_inverse=True)
        fixed_C = np.where(np.isinf(sorts_C3[:, 0]), 0.0, sorts_C3[:, 0])
        views.append(View(group, class_N.ravel(), fixed_C))
    return views
