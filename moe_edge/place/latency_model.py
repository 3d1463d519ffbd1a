"""Predicted seconds of a request under a placement, without simulating it.

Per server n and layer l, for a batch of T tokens, each calling K blocks:

  block i is called with probability p_i = 1 - (1 - pi_i)^T by T pi_i tokens, where
  pi_i = K x its frequency (at most 1); calls of blocks are taken as independent.
  P(any remote call) = 1 - prod over remote i of (1 - p_i)
  remote = P(any) x (mean seconds of one call of one token, nothing in its way)
           + what more tokens and waiting for links add: messages leave one after
             another, a token once to a GPU that has several of its blocks, and the
             last server to answer decides
  local  = calls of held blocks, one after another on each GPU
  layer  = the slower of local and remote, since the layer waits for its last expert

A block adds to a few sums, so that toggling one is O(1): the marginal costs of all
blocks on all servers are array expressions. The last server to answer is smoothed (a
power mean) where marginals need a slope.

A request's other work (dense layers) is added. Where request rates are known, calls
last longer by what others take of their links, and a request waits for those before it
(`link_delays`, `sojourn`).
Source: ours; the maximum over experts is that of Prism's eq. 1.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from moe_edge.core.checks import one_or_each
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.call_costs import Batch, CallCosts, views_of
from moe_edge.place.latency_state import State, known_of, layer_seconds
from moe_edge.place.problem import Problem

VARIATION = 1.5  # E[S^2] / E[S]^2 of a request's seconds: lengths differ
FULL = 0.9  # utilisation above which waits are continued as a straight line


class LatencyModel:
    """Seconds of a mean request.

    Args:
      frequency_NLE: calls of blocks; a server's total is its share of all calls.
      costs: of calls.
      top_k: blocks a token calls.
      batches: prefill and decode.
      rate_N: requests per second of each server; None: one request at a time.
      rest_N: seconds of a request of each server besides its experts; None: 0.

    Attributes:
      weight_N: share of requests of each server.
      blend: 0 predicts; up to 1 counts what overlaps as a sum (`State.finish`), which
        is easier to descend on.
    """

    def __init__(
        self,
        frequency_NLE: np.ndarray,
        costs: CallCosts,
        top_k: int,
        batches: Sequence[Batch],
        rate_N: np.ndarray | None = None,
        rest_N: np.ndarray | None = None,
    ):
        N = len(frequency_NLE)
        total_NL1 = frequency_NLE.sum(axis=-1, keepdims=True)
        self.batches = [b.by_server(N) for b in batches]
        calls_N = sum((b.per_request * b.tokens).ravel() for b in self.batches)
        share_N = total_NL1.mean(axis=(1, 2)) / calls_N
        self.weight_N = share_N / share_N.sum()
        pi_NLE = np.minimum(top_k * frequency_NLE / total_NL1, 1 - 1e-9)
        self.costs = costs
        self.known = [known_of(batch, pi_NLE, costs) for batch in self.batches]
        self.rate_N = rate_N
        self.rest_N = np.zeros(N) if rest_N is None else rest_N
        self.blend = 0.0
        self.nearest_NM = costs.nearest()
        self.views = views_of(costs)

    @classmethod
    def of(cls, problem: Problem) -> "LatencyModel":
        """The prediction for a problem with a cost model.

        Raises:
          ConfigError: numbers for another count of servers.
        """
        traffic, rate_N = problem.traffic, None
        if (given := traffic.requests_per_s) is not None:
            rate_N = one_or_each("requests_per_s", given, len(problem.slots))
        return cls(
            problem.frequency_NLE,
            CallCosts.of(costs_of(problem)),
            traffic.top_k,
            [Batch(traffic.prompt_tokens, 1.0), Batch(1.0, traffic.output_tokens)],
            rate_N,
            dense_seconds(problem),
        )

    def owners(self, on_NLE: np.ndarray) -> np.ndarray:
        """int64 [N, L, E]: the nearest other server that holds a block.

        The nearest server at all for a block that no other server holds: it would have
        to go somewhere.
        """
        held_IM = on_NLE.reshape(len(on_NLE), -1).T
        owner_NI = np.zeros(held_IM.T.shape, np.int64)
        for server, order in enumerate(self.nearest_NM if len(on_NLE) > 1 else ()):
            owner_NI[server] = order[held_IM[:, order].argmax(axis=1)]
        return owner_NI.reshape(on_NLE.shape)

    def states(self, on_NLE: np.ndarray) -> list[State]:
        """What each batch does under a placement."""
        owner_NLE = self.owners(on_NLE)
        states = [
            State(self.costs, batch, known, on_NLE, owner_NLE)
            for batch, known in zip(self.batches, self.known, strict=True)
        ]
        none_NM = np.zeros((len(on_NLE),) * 2)
        for state in states:
            state.finish(self.costs, none_NM, self.blend)
        if self.rate_N is not None:
            there_NM = self.costs.byte_NM * self._per_request(states, "there_NLM")
            back_NM = self.costs.byte_NM.T * self._per_request(states, "back_NLM")
            served_N = self._seconds(states)
            late_NM = link_delays(
                there_NM, back_NM, self.rate_N, served_N, self.costs.one_link
            )
            for state in states:
                state.finish(self.costs, late_NM, self.blend)
        return states

    @staticmethod
    def _per_request(states: list[State], name: str) -> np.ndarray:
        return sum(
            state.batch.per_request[:, 0] * getattr(state, name).sum(axis=1)
            for state in states
        )

    def server_seconds(self, on_NLE: np.ndarray) -> np.ndarray:
        """float64 [N]: of a request of each server, once it is served."""
        return self._seconds(self.states(on_NLE))

    def _seconds(self, states: list[State]) -> np.ndarray:
        total_N = self.rest_N.copy()
        for state in states:
            layer_NL = layer_seconds(*state.sums)[..., 0]
            total_N += state.batch.per_request.ravel() * layer_NL.sum(axis=-1)
        return total_N

    def seconds(self, on_NLE: np.ndarray) -> float:
        """Of a mean request over all servers, with its waiting."""
        served_N = self.server_seconds(on_NLE)
        if self.rate_N is not None:
            served_N, _ = sojourn(served_N, self.rate_N)
        return float(self.weight_N @ served_N)

    def marginals(self, on_NLE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a mean request that holding a block saves: two float64 [N, L, E].

        Of held blocks against dropping them, of others against leaving them away; all
        else stays. First for the server's own requests, then for those of others that
        call the block there or would; that may be negative, where a copy draws calls
        from a server that has more time.
        """
        own_NLE, others_NLE = np.zeros(on_NLE.shape), np.zeros(on_NLE.shape)
        states = self.states(on_NLE)
        weight_N = self.weight_N
        if self.rate_N is not None:
            weight_N = weight_N * sojourn(self._seconds(states), self.rate_N)[1]
        for state in states:
            batch = state.batch
            state.slopes(self.costs)
            remote = [s + np.where(on_NLE, p, 0.0) for s, p in state.pairs]
            local = [s - np.where(on_NLE, 0.0, p) for s, p in state.pairs]
            remote[-1] = state.sums[-1] - np.where(on_NLE, state.parts[-1], 0.0)
            local[-1] = state.sums[-1] + np.where(on_NLE, 0.0, state.parts[-1])
            saved_NLE = layer_seconds(*remote) - layer_seconds(*local)
            own_NLE += batch.per_request * saved_NLE
            others_NLE += self._others(state, weight_N * batch.per_request.ravel())
        return weight_N[:, None, None] * own_NLE, others_NLE

    def _others(self, state: State, weight_N: np.ndarray) -> np.ndarray:
        """float64 [N, L, E]: what others save if server N holds a block."""
        N, L, E = state.on_NLE.shape
        held_NI, owner_NI = state.on_NLE.reshape(N, -1), state.owner_NLE.reshape(N, -1)
        fixed_NI, tokens_NI = state.waits()
        miss_NI = state.parts[0].reshape(N, -1)
        saved_NI = np.zeros(held_NI.shape)
        for view in self.views:
            classes = len(view.fixed_C)
            if classes < 2:
                continue  # to these callers all servers are alike
            member_CN = view.class_N == np.arange(classes)[:, None]
            holders_CI = member_CN.astype(np.int64) @ held_NI
            gain_CI = np.zeros(holders_CI.shape)
            mean_NC = member_CN.T / member_CN.sum(axis=1)
            for n in view.callers:
                away = np.flatnonzero(~held_NI[n])
                rows = np.arange(len(away))
                slope_CX = (state.slope_NLM[n] @ mean_NC)[away // E].T
                seconds_CX = weight_N[n] * (
                    view.fixed_C[:, None] * fixed_NI[n, away]
                    + slope_CX * tokens_NI[n, away]
                    + (state.detour_NLM[n] @ mean_NC)[away // E].T * miss_NI[n, away]
                )
                first_X = view.class_N[owner_NI[n, away]]
                now_X = seconds_CX[first_X, rows]
                # A new copy is asked only if it is nearer, and then always.
                nearer_CX = np.arange(classes)[:, None] < first_X
                gain_CX = np.where(nearer_CX, now_X - seconds_CX, 0.0)
                gain_CI[:, away] += gain_CX
                saved_NI[n, away] -= gain_CX[view.class_N[n]]  # not to itself
                left_CX = holders_CI[:, away]
                left_CX[first_X, rows] -= 1
                second_X = (left_CX > 0).argmax(axis=0)  # the nearest if none is left
                saved_NI[owner_NI[n, away], away] += seconds_CX[second_X, rows] - now_X
            saved_NI += gain_CI[view.class_N]
        return saved_NI.reshape(N, L, E)


def costs_of(problem: Problem) -> CostModel:
    """The machines: who predicts time `needs` them, so a problem without is refused."""
    return cast(CostModel, problem.cost_model)


def dense_seconds(problem: Problem) -> np.ndarray:
    """float64 [N]: of a request's layers without their experts, by its server."""
    N, L, _ = problem.frequency_NLE.shape
    prompt_N, output_N = (
        one_or_each(name, getattr(problem.traffic, name), N)
        for name in ("prompt_tokens", "output_tokens")
    )
    dense_s = costs_of(problem).dense_s
    each = [dense_s(n, prompt_N[n]) + output_N[n] * dense_s(n, 1.0) for n in range(N)]
    return L * np.array(each)


def link_delays(
    there_NM: np.ndarray,
    back_NM: np.ndarray,
    rate_N: np.ndarray,
    served_N: np.ndarray,
    one_link: bool,
) -> np.ndarray:
    """float64 [N, M]: by how much calls from N to M last longer, as a share.

    While a request of server k is served (a share rate x served of the time), it takes
    a share b of a link, and everyone else's calls over that link last 1 / (1 - b) as
    long. Delays by several servers add up.

    Args:
      there_NM: seconds that a request of N occupies the link from N to M; back_NM: that
        the answers of M occupy the link back.
      rate_N, served_N: requests a second, and seconds of one by itself.
      one_link: as in `CallCosts`.
    """

    def delay(link_s):
        """By server [N, ...], from the seconds that its request takes of a link."""
        share = link_s / np.maximum(served_N, 1e-9).reshape(
            -1, *[1] * (link_s.ndim - 1)
        )
        rate = rate_N.reshape(share.shape[:1] + (1,) * (share.ndim - 1))
        busy = np.minimum(rate * link_s, 1.0)
        return busy / (1 - np.minimum(share, FULL))

    answer_NM = delay(back_NM)
    if one_link:
        answers_N = answer_NM.sum(axis=0)
        others_NM = (
            answers_N[:, None] + delay(there_NM.sum(axis=1)) + answers_N - answer_NM
        )
    else:
        others_NM = answer_NM.T + delay(there_NM).T
    np.fill_diagonal(others_NM, 0.0)
    return others_NM


def sojourn(served_N: np.ndarray, rate_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a request with the wait for those before it (M/G/1), and the slope."""

    def total(seconds_N):
        free_N = 1 - np.minimum(rate_N * seconds_N, FULL)
        beyond_N = np.maximum(rate_N * seconds_N - FULL, 0.0)
        wait_N = rate_N * VARIATION * seconds_N**2 / 2 / free_N
        return seconds_N + wait_N * (1 + beyond_N / free_N)

    step_N = 1e-4 * np.maximum(served_N, 1e-9)
    return total(served_N), (total(served_N + step_N) - total(served_N)) / step_N
