"""What the calls of a batch add up to under a placement (see `latency_model`)."""

import numpy as np

from moe_edge.place.call_costs import Batch, CallCosts

TINY = 1e-12


class State:
    """Sums of a batch under a placement, and what each block adds to them.

    Attributes:
      parts: float64 [N, L, E] each: miss, called, fixed, tokens, one, last of a block
        if it is remote; seconds of its call if it is held.
      sums: float64 [N, L, 1] each: over remote blocks, the last over held ones.
      sent_NLM, chance_NLM: pairs sent to each server, probability of any.
      there_NLM, back_NLM: bytes sent to each server, and of its answers.
      slope_NLM: seconds that a further pair to each server adds.
      detour_NLM: seconds of waiting for links that a unit of miss adds.
    """

    def __init__(self, costs: CallCosts, batch: Batch, known, on_NLE, owner_NLE):
        N, L, _ = on_NLE.shape
        self.batch, self.on_NLE, self.owner_NLE = batch, on_NLE, owner_NLE
        row_N11 = np.arange(N)[:, None, None]
        miss_NLE, called_NLE, tokens_NLE, further_NLE, held_NLE = known
        busy_NLE = called_NLE + costs.further_N[owner_NLE] * further_NLE
        busy_NLE *= (costs.local_N / costs.gpus_N)[owner_NLE]
        fixed_NLE = called_NLE * costs.fixed_NM[row_N11, owner_NLE]
        away = ~on_NLE
        cell_X = ((row_N11 * L + np.arange(L)[:, None]) * N + owner_NLE)[away]

        def by_owner(value_NLE):
            return np.bincount(cell_X, value_NLE[away], N * L * N).reshape(N, L, N)

        self.sent_NLM, self.busy_NLM = by_owner(tokens_NLE), by_owner(busy_NLE)
        self.miss_NLM = by_owner(miss_NLE)
        self.chance_NLM = -np.expm1(-self.miss_NLM)
        # A call of one pair: the whole token.
        ways_NM = costs.sizes.there(1, 1) * costs.byte_NM
        ways_NM = ways_NM + costs.sizes.back(1, 1) * costs.back_byte_NM
        one_NLE = tokens_NLE * ways_NM[row_N11, owner_NLE] + busy_NLE
        self._count_bytes(costs)
        self.parts = [miss_NLE, called_NLE, fixed_NLE, tokens_NLE, one_NLE]
        sums = [np.where(away, p, 0.0).sum(axis=-1)[..., None] for p in self.parts]
        held_NL1 = np.where(on_NLE, held_NLE, 0.0).sum(axis=-1)[..., None]
        self.sums = [*sums, np.zeros_like(held_NL1), held_NL1]
        self.parts += [np.zeros_like(held_NLE), held_NLE]
        self._busy_NLE = busy_NLE

    def _count_bytes(self, costs: CallCosts) -> None:
        """What the pairs of a token that go to the same GPU share travels once.

        A token sends something to a GPU with probability 1 - exp(-miss / tokens).
        """
        self._tokens_N1M = tokens_N1M = self.batch.tokens * costs.gpus_N  # on all GPUs
        tokens_NLM = -np.expm1(-self.miss_NLM / tokens_N1M) * tokens_N1M
        # At most one a pair: a single block is on one GPU, not on a part of each.
        self._apart_NLM = self.sent_NLM < (1 - 1e-9) * tokens_NLM
        tokens_NLM = np.minimum(tokens_NLM, self.sent_NLM)
        self.there_NLM = costs.sizes.there(tokens_NLM, self.sent_NLM, self.chance_NLM)
        self.back_NLM = costs.sizes.back(tokens_NLM, self.sent_NLM)

    def finish(self, costs: CallCosts, late_NM: np.ndarray, blend: float) -> None:
        """Adds when the last server has answered, where links are late by these shares.

        `blend`: 0 for the last answer, 1 for the sum of all (nothing overlaps).
        """
        self._late_N1M = 1 + late_NM[:, None]
        self._wait_N1M = costs.fixed_NM[:, None] * late_NM[:, None]
        self._blend = blend
        send_NLM = self.there_NLM * (costs.byte_NM[:, None] * self._late_N1M)
        rest_NLM = self.back_NLM * (costs.back_byte_NM[:, None] * self._late_N1M)
        rest_NLM += self.busy_NLM * self._late_N1M
        rest_NLM += self.chance_NLM * self._wait_N1M
        self.sums[5] = blend * (send_NLM + rest_NLM).sum(axis=-1)[..., None]
        if costs.one_link:
            np.cumsum(send_NLM, axis=-1, out=send_NLM)
        self._end_NLM = np.where(self.sent_NLM > 0, send_NLM + rest_NLM, 0.0)
        self.sums[5] += (1 - blend) * self._end_NLM.max(axis=-1)[..., None]

    def slopes(self, costs: CallCosts) -> None:
        """Adds what each block means for the last answer."""
        blend, late_N1M, sizes = self._blend, self._late_N1M, costs.sizes
        last_NL1 = self._end_NLM.max(axis=-1, keepdims=True)
        # The mean of order 4 stands for the maximum; squares are faster than a power.
        decides_NLM = np.square(np.square(self._end_NLM / np.maximum(last_NL1, TINY)))
        decides_NLM /= np.maximum(decides_NLM.sum(axis=-1, keepdims=True), TINY)
        delays_NLM = decides_NLM
        if costs.one_link:
            delays_NLM = decides_NLM[..., ::-1].cumsum(axis=-1)[..., ::-1]
        decides_NLM = blend + (1 - blend) * decides_NLM
        delays_NLM = blend + (1 - blend) * delays_NLM
        there_NLM = delays_NLM * costs.byte_NM[:, None] * late_N1M
        back_NLM = decides_NLM * costs.back_byte_NM[:, None] * late_N1M
        pair_NLM = sizes.pair * there_NLM + sizes.pair_row * back_NLM
        state_NLM = sizes.state * there_NLM + sizes.token_row * back_NLM
        # A further pair is the first of its token with this probability.
        first_NLM = np.exp(-self.miss_NLM / self._tokens_N1M)
        first_NLM[self._apart_NLM] = 1.0
        self.slope_NLM = first_NLM * state_NLM + pair_NLM
        # Not the slope but the mean: one call less saves little, all of them much.
        some_NLM = self.miss_NLM > TINY
        mean_NLM = np.where(some_NLM, self.chance_NLM, 1.0)
        mean_NLM = mean_NLM / np.where(some_NLM, self.miss_NLM, 1.0)
        self.detour_NLM = decides_NLM * mean_NLM * self._wait_N1M

        def at_owner(value_NLM):
            return np.take_along_axis(value_NLM, self.owner_NLE, axis=-1)

        # Tokens that no other block brings there.
        rows_N11 = np.arange(len(late_N1M))[:, None, None]
        tokens_NLE = self._tokens_N1M[rows_N11, 0, self.owner_NLE]
        miss_NLE = np.where(self.on_NLE, -1, 1) * self.parts[0] / tokens_NLE
        alone_NLE = np.abs(np.expm1(miss_NLE)) * tokens_NLE * at_owner(first_NLM)
        alone_NLE = np.minimum(alone_NLE, self.parts[3])
        alone_NLE = np.where(at_owner(self._apart_NLM), self.parts[3], alone_NLE)
        self.parts[5] = (
            self.parts[3] * at_owner(pair_NLM)
            + alone_NLE * at_owner(state_NLM)
            + self._busy_NLE * at_owner(decides_NLM * late_N1M)
            + self.parts[0] * at_owner(self.detour_NLM)
        )

    @property
    def pairs(self):
        """(sum, part) in turn."""
        return zip(self.sums, self.parts, strict=True)

    def waits(self) -> tuple[np.ndarray, np.ndarray]:
        """[N, L * E] each: share of a block's fixed seconds, and tokens, waited for."""
        miss, called, _, tokens, *_ = self.sums
        any_remote = -np.expm1(-np.maximum(miss, 0.0))
        fixed_NLE = self.parts[1] * any_remote / np.maximum(called, TINY)
        queued = np.maximum(1 - any_remote / np.maximum(tokens, TINY), 0.0)
        N = len(fixed_NLE)
        return fixed_NLE.reshape(N, -1), (self.parts[3] * queued).reshape(N, -1)


def known_of(batch: Batch, pi_NLE: np.ndarray, costs: CallCosts) -> list[np.ndarray]:
    """Miss, called, tokens, further tokens and held of a block, wherever it is."""
    miss_NLE = -batch.tokens * np.log1p(-pi_NLE)
    called_NLE = -np.expm1(-miss_NLE)
    tokens_NLE = batch.tokens * pi_NLE
    further_NLE = np.maximum(tokens_NLE - called_NLE, 0.0)
    held_NLE = called_NLE + costs.further_N[:, None, None] * further_NLE
    held_NLE *= (costs.local_N / costs.gpus_N)[:, None, None]
    return [miss_NLE, called_NLE, tokens_NLE, further_NLE, held_NLE]


def layer_seconds(miss, called, fixed, tokens, one, last, held):
    """Seconds of a layer from sums over its remote blocks, and over held ones.

    Args:
      miss: minus the log of the probability of no remote call.
      called, fixed: expected remote calls; their seconds, each alone and of one token.
      tokens, one: expected tokens sent; seconds on links and GPUs, one after another.
      last: when the last server has answered, latencies apart.
      held: seconds of the calls of held blocks.
    """
    any_remote = -np.expm1(-np.maximum(miss, 0.0))
    chance = np.maximum(any_remote, TINY)
    first = fixed / np.maximum(called, TINY)
    queue = last / chance - one / np.maximum(tokens, TINY)
    remote = first + np.maximum(queue, 0.0)
    return held + any_remote * np.maximum(remote - held, 0.0)
