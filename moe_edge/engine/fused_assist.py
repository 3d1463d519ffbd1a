"""Experts of a decode step that the host computes while the device does the others.

Before a layer's look-up the program knows which of the chosen experts are in no slot.
How many of so many the host takes says a table, made of an assist's rule and of costs
measured once; those with the worst scores are its. START (`kernels.assist`) has them
computed where their records lie, meanwhile the device computes hits and the link
carries the others, and WAIT brings the rows, which are added in order of rank. All of
it is in the step's program: the host reads nothing and decides nothing.

Deferred, the rows are added to the output of the program's next layer with experts
instead, so the host has a layer longer; the last layer of a program waits for its own.
That is lossy: what stands between the two layers does not see them (KTransformers).

On a CPU the bits are those of the resident engine. On a GPU other kernels compute there
than here, so a sum differs in its last places (gate B), as with mode layered.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.core.checks import ConfigError
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.kernels import assist as calls
from moe_edge.kernels import native
from moe_edge.kernels.lookup_programs import MISSES
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_groups import add_ranks
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.offload.assist import HostExperts
from moe_edge.offload.assist_base import Assist, AssistCosts

MEASURED = 8  # experts at once: more than the processor's caches hold


def measure_costs(config: ModelConfig, host_ER: jax.Array) -> AssistCosts:
    """Seconds of an expert: over the link, and of one token on the host's cores.

    Args:
      host_ER: a layer's records in host memory.
    """
    count = min(MEASURED, host_ER.shape[0])
    part = count, host_ER.shape[1]

    @jax.jit
    def carry(host_ER):
        return jax.device_put(lax.slice(host_ER, (0, 0), part), jax.memory.Space.Device)

    records_ER = np.asarray(carry(host_ER))
    experts = HostExperts(config, [*records_ER])
    x_TD = np.ones((1, config.d_model), np.float32)
    ids_TK = np.arange(count, dtype=np.int32)[None]
    given = range(count), x_TD, ids_TK, np.ones((1, count), np.float32)
    load_s = _least_s(lambda: jax.block_until_ready(carry(host_ER))) / count
    return AssistCosts(load_s, _least_s(lambda: experts.outputs(*given)) / count, 0.0)


def _least_s(call, rounds: int = 3) -> float:
    call()
    took = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun_s)
    return max(min(took), 1e-9)


def split_table(assist: Assist, costs: AssistCosts, most: int) -> list[int]:
    """How many of 0, 1, .. `most` absent experts the host computes.

    Raises:
      ConfigError: the assist takes others than the last ones.
    """
    table = []
    for absent in range(most + 1):
        experts = list(range(absent))
        taken = [*assist.take(experts, np.array([experts], np.int32), costs)]
        if sorted(taken) != experts[absent - len(taken) :]:
            raise ConfigError(
                f"assist {assist.name} took experts {taken} of {absent} absent ones, "
                "best first, and takes_last says that it takes the last ones"
            )
        table.append(len(taken))
    return table


class Helped(NamedTuple):
    """What the host computes of a layer, until WAIT."""

    under_way: calls.UnderWay
    elsewhere_E: jax.Array  # bool, its experts
    ids_TK: jax.Array  # int32, what the device computes; E elsewhere
    weights_TK: jax.Array  # float32, of all that was chosen
    is_deferred: bool  # a later layer adds the rows


class FusedAssist:
    """Splits absent experts of decode steps between the host and the link.

    Args:
      device: whose slots and policy they are.
      config: the model.
      assist: the rule, one that `takes_last`.
      costs: of `measure_costs`.
      defers: whether the next layer adds the rows.
    Raises:
      ConfigError: there are no host kernels, or the assist takes others.
    """

    def __init__(
        self,
        device: DeviceCache,
        config: ModelConfig,
        assist: Assist,
        costs: AssistCosts,
        defers: bool = False,
    ):
        calls.open_calls()
        self._device, self._moe = device, config.moe
        self._layout = RecordLayout.of(config)
        self.assist, self.costs, self.defers = assist, costs, defers
        self.table = split_table(assist, costs, config.moe.num_experts)

    def empty(self, cache: Cache) -> Cache:
        """With the table, which is data: another one needs no new compilation."""
        table_M = jnp.array(self.table, jnp.int32)
        return cache._replace(of_absent_M=table_M, helped=jnp.int32(0))

    def report(self, helped: int, record_bytes: int) -> dict:
        """The split, what the host computed, and what so was not sent.

        Args:
          helped: experts that it computed.
        """
        return {
            "assist": self.assist.name,
            "assist_deferred": self.defers,
            "assist_costs": self.costs._asdict(),
            "of_absent": self.table[: self._moe.top_k + 1],
            "host_computed": helped,
            "bytes_not_sent": helped * record_bytes,
        }

    def suits(self, waves: ExpertWaves, hidden_TD: jax.Array) -> bool:
        """Whether the host helps a step of so many rows."""
        return waves.method == "pairs" and len(hidden_TD) <= native.MAX_ROWS

    def begin(
        self, cache: Cache, layer, hidden_TD, routing: Routing, host_ER, is_last: bool
    ) -> tuple[Cache, Helped]:
        """START, before a layer's look-up.

        Args:
          layer: int or int32 scalar.
          hidden_TD: float32, what experts take.
          routing: with the scores by which the best ones travel.
          host_ER: the layer's records in host memory.
          is_last: of those with experts in its program.
        Returns:
          (cache; what is under way, and what the device is to compute behind it).
        """
        moe, ids_TK = self._moe, routing.ids_TK
        E = moe.num_experts
        elsewhere_E = self._split(cache, layer, routing)
        is_elsewhere_TK = elsewhere_E[jnp.minimum(ids_TK, E - 1)] & (ids_TK < E)
        host_TK = jnp.where(is_elsewhere_TK, ids_TK, E)
        ids_TK = jnp.where(is_elsewhere_TK, E, ids_TK)
        under_way, (ids_TK,) = calls.start(
            *(host_TK, hidden_TD, host_ER, self._layout),
            *(moe.activation, moe.swiglu_limit, [ids_TK]),
        )
        helped = jnp.sum(elsewhere_E, dtype=jnp.int32)
        at = jnp.asarray(layer, jnp.int32), jnp.int32(MISSES)
        missed_11 = lax.dynamic_slice(cache.counts_L3, at, (1, 1)) + helped
        counts_L3 = lax.dynamic_update_slice(cache.counts_L3, missed_11, at)
        cache = cache._replace(helped=cache.helped + helped, counts_L3=counts_L3)
        given = under_way, elsewhere_E, ids_TK, routing.weights_TK
        return cache, Helped(*given, self.defers and not is_last)

    def _split(self, cache: Cache, layer, routing: Routing) -> jax.Array:
        """bool `[E]`: those of the absent that the host computes, the worst ones."""
        E, ids_TK = self._moe.num_experts, routing.ids_TK
        if self._device.policy.forgets:  # what it has emptied before the look-up
            given = ids_TK, routing.scores_TE
            cache = self._device.touch(cache, layer, *given)
        experts_E = jnp.arange(E, dtype=jnp.int32)
        is_TKE = ids_TK[:, :, None] == experts_E[None, None]
        chosen_TE = jnp.any(is_TKE, axis=1)
        absent_E = jnp.any(chosen_TE, axis=0) & (
            self._device.slots_of(cache, layer) < 0
        )
        # As misses load: in the order of a token's choice, or of tokens' scores.
        if ids_TK.shape[0] == 1:
            urgency_E = -jnp.argmax(is_TKE[0], axis=0).astype(jnp.float32)
        else:
            scores_TE = jnp.where(chosen_TE, routing.scores_TE, -jnp.inf)
            scores_TE = jnp.where(scores_TE == scores_TE, scores_TE, jnp.inf)
            urgency_E = jnp.max(scores_TE, axis=0)
        is_sooner_EE = urgency_E[None] > urgency_E[:, None]
        is_tie_EE = urgency_E[None] == urgency_E[:, None]
        is_sooner_EE |= is_tie_EE & (experts_E[None] < experts_E[:, None])
        rank_E = jnp.sum(is_sooner_EE & absent_E[None], axis=1, dtype=jnp.int32)
        absent = jnp.sum(absent_E, dtype=jnp.int32)
        return absent_E & (rank_E >= absent - cache.of_absent_M[absent])

    def end(
        self, helped: Helped, rows_PD: jax.Array, scale_P: jax.Array | None = None
    ) -> jax.Array:
        """WAIT: the rows of all pairs; zeros of those that are deferred.

        Args:
          rows_PD: of pairs that the device computed; others are arbitrary.
          scale_P: float32, a factor that these rows have already; None: 1.
        """
        is_elsewhere_P1 = helped.under_way.ids_TK.reshape(-1, 1) < self._moe.num_experts
        if helped.is_deferred:
            return jnp.where(is_elsewhere_P1, 0.0, rows_PD)
        host_PD, (rows_PD,) = calls.wait(helped.under_way, [rows_PD])
        if scale_P is not None:
            host_PD = host_PD * scale_P[:, None]
        return jnp.where(is_elsewhere_P1, host_PD, rows_PD)

    def add(self, y_TD: jax.Array, helped: Helped) -> jax.Array:
        """WAIT of an earlier layer: its rows added to another's output `[T, D]`."""
        host_PD, (y_TD,) = calls.wait(helped.under_way, [y_TD])
        host_PD = host_PD * helped.weights_TK.reshape(-1, 1)
        is_elsewhere_TK = helped.under_way.ids_TK < self._moe.num_experts
        return add_ranks(y_TD, host_PD, is_elsewhere_TK)


class HelpedWaves:
    """The waves of a layer of which the host computes some experts: rows are kept
    apart until those of the host are there, then all are summed in order of rank.

    Args:
      waves: of the form `pairs`.
      routing: all that is to be summed, also what the host computes.
    """

    method = "pairs"

    def __init__(
        self, waves: ExpertWaves, assist: FusedAssist, helped: Helped, routing: Routing
    ):
        self._waves, self._assist, self._helped = waves, assist, helped
        self._routing = routing

    def start(self, x_TD: jax.Array, ids_TK: jax.Array) -> jax.Array:
        return jnp.zeros((ids_TK.size, x_TD.shape[1]), jnp.float32)

    def run(self, carry, x_TD, ids_TK, weights_TK, slots_SR, slot_of) -> jax.Array:
        """As `ExpertWaves.run`."""
        rows_PD = self._waves.rows(x_TD, ids_TK, slots_SR, slot_of)
        is_here_P1 = slot_of.reshape(-1, 1) < slots_SR.shape[0]
        return jnp.where(is_here_P1, rows_PD, carry)

    def finish(self, carry, ids_TK, weights_TK) -> jax.Array:
        """WAIT, and the layer's output `[T, D]`."""
        rows_PD = self._assist.end(self._helped, carry)
        _, weights_TK, _ = self._routing
        return self._waves.sum_rows(rows_PD, self._routing.ids_TK, weights_TK)
