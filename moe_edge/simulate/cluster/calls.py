"""Who computes what: the target of every call, and a step's calls, vectorised.

A step of a server is one pass of its batch through all layers. All that a step asks of
one GPU in one layer is one call: one message out, its blocks one after another, one
message back. Whom a server asks: `place/call_targets.py`.
"""

import dataclasses
from collections import deque
from typing import NamedTuple

import numpy as np

from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.call_targets import check_covered, nearest_holders
from moe_edge.simulate.cluster.pools import RoutingPools

AHEAD = 64  # tokens of a lone request planned at a time
_TABLE = 512  # tokens up to which block times are looked up


class GpuIndex:
    """All GPUs of a cluster in one row, server by server.

    Attributes:
      first_N: int64 [N + 1], the first GPU of each server.
      server_G: int64 [G], the server of each GPU.
      one_G: float64 [G], seconds of a block over one token.
      call_SG: float64, seconds of a call, besides its blocks, in a stage on a GPU.
    """

    def __init__(self, cost_model: CostModel):
        servers = cost_model.cluster.servers
        sizes = [len(server.gpus) for server in servers]
        self.first_N = np.concatenate([[0], np.cumsum(sizes)])
        self.server_G = np.repeat(np.arange(len(servers)), sizes)
        self._cost_model = cost_model
        kinds: dict = {}
        self._kind_G = np.empty(len(self.server_G), np.int64)
        for gpu, n in enumerate(self.server_G.tolist()):
            g = gpu - int(self.first_N[n])
            device = servers[n].gpus[g].device
            kinds.setdefault(device, (len(kinds), n, g))
            self._kind_G[gpu] = kinds[device][0]
        self._places = [place for _, *place in kinds.values()]
        self._seconds_SKT = np.array(
            [
                [
                    cost_model.compute_s(*place, np.arange(_TABLE), stage)
                    for place in self._places
                ]
                for stage in range(cost_model.num_stages)
            ]
        )
        self.one_G = self._seconds_SKT[0, self._kind_G, 1]
        self.call_SG = np.array(
            [
                [cost_model.call_s(n, stage) for n in self.server_G.tolist()]
                for stage in range(cost_model.num_stages)
            ]
        )

    def block_s(
        self, gpus: np.ndarray, tokens: np.ndarray, stage: int = 0
    ) -> np.ndarray:
        """Seconds of one block over so many tokens, for pairs of GPU and count.

        Args:
          stage: of the step (`CostModel.stage`).
        """
        kinds = self._kind_G[gpus]
        seconds = self._seconds_SKT[stage, kinds, np.minimum(tokens, _TABLE - 1)]
        if (large := tokens >= _TABLE).any():
            for kind, place in enumerate(self._places):
                here = large & (kinds == kind)
                seconds[here] = self._cost_model.compute_s(*place, tokens[here], stage)
        return seconds


class CallTable:
    """The GPU that each server asks for each block.

    Attributes:
      target_NX: int32 [N, L * E], index of a GPU (`GpuIndex`).
      gpu_NX: int32 [N, L * E], where blocks are: index of a GPU of the server, -1 if
        it does not hold the block.
      version: how often targets were changed.
    """

    def __init__(self, gpu_NLE: np.ndarray, cost_model: CostModel, index: GpuIndex):
        self._first_N1 = index.first_N[:-1, None].astype(np.int32)
        # Of an idle call of one token to each GPU.
        send_NM = cost_model.sends_s()
        idle_NM = send_NM + send_NM.T + cost_model.software_s()
        self._idle_NG = idle_NM[:, index.server_G] + index.one_G
        self.version = 0
        self.place(gpu_NLE)

    def place(self, gpu_NLE: np.ndarray) -> None:
        """Takes over a placement (`Placement.gpu_NLE`).

        Raises:
          CapacityError: a block that nobody holds.
        """
        gpu_NX = np.asarray(gpu_NLE, np.int32).reshape(len(gpu_NLE), -1)
        self.gpu_NX = np.where(gpu_NX >= 0, gpu_NX + self._first_N1, -1)
        self.target_NX = np.empty_like(self.gpu_NX)
        self.update(np.arange(self.gpu_NX.shape[1]))

    def update(self, blocks: np.ndarray) -> None:
        """Finds the targets of some blocks again, after `gpu_NX` was changed.

        Raises:
          CapacityError: a block that nobody holds.
        """
        self.version += 1
        gpu_MX = self.gpu_NX[:, blocks]
        held_MX, columns = gpu_MX >= 0, np.arange(len(blocks))
        check_covered(held_MX, blocks)
        for n, idle_G in enumerate(self._idle_NG):
            holders = nearest_holders(n, held_MX, idle_G[gpu_MX])
            self.target_NX[n, blocks] = gpu_MX[holders, columns]


@dataclasses.dataclass(slots=True)
class StepCalls:
    """What one step of one server asks, layer by layer; plain lists for the loop.

    Attributes:
      gpu: of every call, layer after layer (steps planned together share these lists).
      pairs: (token, block) pairs in it.
      there, back: bytes of its message and of the answer.
      seconds: of computing its blocks.
      offset: [L + 1], calls of layer l are offset[l] to offset[l + 1].
      cells, counts: the blocks asked for (layer * E + block) and their pairs.
      away: [L], how many calls of a layer go to other servers; empty where that costs
        nothing.
    """

    gpu: list[int]
    pairs: list[int]
    there: list[int]
    back: list[int]
    seconds: list[float]
    offset: list[int]
    cells: np.ndarray
    counts: np.ndarray
    local_pairs: int
    remote_pairs: int
    remote_blocks: int
    away: list[int]


class Ahead(NamedTuple):
    """Steps that were planned together: a lone request's next tokens."""

    request: int
    version: int
    steps: deque[StepCalls]


class StepPlanner:
    """Turns the routing of steps into calls."""

    def __init__(self, index: GpuIndex, pools: RoutingPools, cost_model: CostModel):
        self.index, self.pools, self._cost_model = index, pools, cost_model
        self.num_layers, self.num_experts = pools.num_layers, pools.num_experts
        self._sizes, self._counts_away = cost_model.call_sizes, cost_model.has_software
        self._num_gpus = len(index.server_G)
        self._ahead: dict[int, Ahead] = {}

    def next_token(
        self, server: int, table: CallTable, request: int, domain: str, row: int, left
    ) -> StepCalls:
        """The calls of the next token of a request that a server runs alone.

        Of the tokens that are `left` up to AHEAD are planned at a time, from `row` on.
        """
        known = self._ahead.get(server)
        if known is None or known[:2] != (request, table.version) or not known.steps:
            cells = self.pools.cells(domain, row, min(left, AHEAD))
            steps = self.plan_tokens(server, table.target_NX[server], cells)
            known = self._ahead[server] = Ahead(request, table.version, deque(steps))
        return known.steps.popleft()

    def plan(self, server: int, target_X: np.ndarray, cells: np.ndarray) -> StepCalls:
        """The calls of one step of a server.

        Args:
          target_X: its row of `CallTable.target_NX`.
          cells: int [T, L * K], layer * E + expert of every choice of every token.
        """
        self._ahead.pop(server, None)
        counts_X = np.bincount(cells.reshape(-1), minlength=self.pools.num_blocks)
        found = np.flatnonzero(counts_X)
        counts, stage = counts_X[found], self._cost_model.stage(len(cells))
        gpus = target_X[found]
        seconds = self.index.block_s(gpus, counts, stage)
        keys = found // self.num_experts * self._num_gpus + gpus
        order = keys.argsort(kind="stable")
        parts = (keys[order], counts[order], seconds[order])
        tokens_Y = None
        if self._sizes.needs_tokens:
            keys_TX = cells // self.num_experts * self._num_gpus + target_X[cells]
            keys_TX.sort(axis=1)
            first_TX = np.diff(keys_TX, axis=1, prepend=-1) > 0
            tokens_Y = np.bincount(keys_TX[first_TX], minlength=int(keys.max()) + 1)
        return self._grouped(server, *parts, [(found, counts)], tokens_Y, stage)[0]

    def plan_tokens(
        self, server: int, target_X: np.ndarray, cells: np.ndarray
    ) -> list[StepCalls]:
        """The calls of steps of one token each, one a row of `cells`."""
        S, L = len(cells), self.num_layers
        gpus = target_X[cells].reshape(S * L, -1)
        gpus = np.sort(gpus, axis=1)  # a token's blocks of a layer cost the same each
        keys = (gpus + np.arange(S * L)[:, None] * self._num_gpus).reshape(-1)
        ones = np.ones(len(keys), np.int64)
        seconds = self.index.one_G[gpus].reshape(-1)
        counts = ones[: cells.shape[1]]
        steps = [(row, counts) for row in cells]
        return self._grouped(server, keys, ones, seconds, steps)

    def _grouped(
        self, server, keys, counts, seconds, steps, tokens_Y=None, stage=0
    ) -> list[StepCalls]:
        """One StepCalls a step (of cells and counts), from blocks in order of `keys`.

        A key is (step * L + layer) * GPUs + GPU of a block asked for. `tokens_Y`: by
        key, different tokens of a call; None: one each.
        """
        L, first = self.num_layers, np.empty(len(keys), bool)
        first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        keys = keys[starts]
        pairs = np.add.reduceat(counts, starts)
        seconds = np.add.reduceat(seconds, starts)
        gpu = keys % self._num_gpus
        away = self.index.server_G[gpu] != server
        blocks = np.diff(starts, append=len(counts))
        edges = np.arange(len(steps) * L + 1) * self._num_gpus
        offset = np.searchsorted(keys, edges)
        ends = offset[::L]
        sums = np.zeros((len(keys) + 1, 4), np.int64)
        each = np.stack([pairs, pairs * away, blocks * away, away], 1)
        np.cumsum(each, 0, out=sums[1:])
        away_SL = []
        if self._counts_away:
            seconds = np.where(away, seconds + self.index.call_SG[stage, gpu], seconds)
            away_SL = np.diff(sums[offset, 3]).tolist()
        sums = np.diff(sums[ends], axis=0).tolist()
        tokens = 1 if tokens_Y is None else tokens_Y[keys]
        there = self._sizes.there(tokens, pairs).tolist()
        back = self._sizes.back(tokens, pairs).tolist()
        lists = (gpu.tolist(), pairs.tolist(), there, back, seconds.tolist())
        offset = offset.tolist()
        return [
            StepCalls(
                *(*lists, offset[s * L : (s + 1) * L + 1], cells, counts),
                local_pairs=all_pairs - remote_pairs,
                remote_pairs=remote_pairs,
                remote_blocks=remote_blocks,
                away=away_SL[s * L : (s + 1) * L],
            )
            for s, ((cells, counts), (all_pairs, remote_pairs, remote_blocks, _)) in (
                enumerate(zip(steps, sums, strict=True))
            )
        ]
