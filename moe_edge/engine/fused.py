"""The fused engine: a decode step with its expert fetches is one program.

Records of all experts lie in host memory, one array a layer; the device holds slots
and the cache's state (`fused_cache`). Router, table, eviction and transfer are one
program, so the host never waits for a router's choice and dispatches once a step.
Prefill runs one program a layer.

Lossless: seams keep XLA from fusing across the borders at which the resident engine
changes programs, and the experts are summed in the same order (`expert_waves`), so
logits have the same bits at any number of slots.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.engine.base import Engine
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_counts import Counting, Counts
from moe_edge.engine.fused_waves import run_through_slots
from moe_edge.engine.programs import Programs, jit_step
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights, bind_block, block_graph
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import choose_method
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import add_experts, layer_window, seam
from moe_edge.offload.policy import CacheSpec, EvictionPolicy
from moe_edge.route.base import RoutePolicy, gate_scores


class FusedEngine(Engine):
    """Runs a model whose experts do not fit the device, at one dispatch a token.

    Args:
      weights: the model; its experts are not used.
      hosts: per layer the records `[E, R]` in host memory (`pin_records`), None in
        dense layers.
      spec: layers, experts and slots of the cache.
      policy: who leaves a full cache; must run inside jit.
      route: changes the routing by what is resident (`RoutePolicy`); None: never.
      expert_method: as in `ResidentEngine`.
    Raises:
      ConfigError: a spec that does not fit the model, or a policy for the host.
      CapacityError: a MoE layer without a slot.
    """

    def __init__(
        self,
        weights: Weights,
        hosts: Sequence[jax.Array | None],
        spec: CacheSpec,
        policy: EvictionPolicy,
        *,
        route: RoutePolicy | None = None,
        expert_method: str | None = None,
    ):
        config = weights.config
        moe, layout = config.moe, RecordLayout.of(config)
        got = (spec.num_layers, spec.num_experts, spec.top_k)
        if got != (config.num_layers, moe.num_experts, moe.top_k):
            raise ConfigError(
                f"the cache is for (layers, experts, top_k) = {got}, the model has "
                f"{(config.num_layers, moe.num_experts, moe.top_k)}"
            )
        for layer in config.moe_layers:
            name = f"expert records of layer {layer}"
            check_shape(name, hosts[layer], (moe.num_experts, layout.size))
        self._device = jax.local_devices()[0]
        super().__init__(
            dataclasses.replace(
                weights,
                top=self._commit(weights.top),
                layers=self._commit(weights.layers),
                experts=(None,) * config.num_layers,
            ),
            [(layer,) for layer in range(config.num_layers)],
            Programs(config),
        )
        self._cache_of = DeviceCache(spec, policy, config.moe_layers)
        self._hosts = tuple(hosts)
        self._layout, self._route, self._method = layout, route, expert_method
        self._graphs = {kind: block_graph(config, kind) for kind in (False, True)}
        self._windows, self._layer_ids = self._commit(
            (
                [np.int32(layer_window(config, i)) for i in range(config.num_layers)],
                [np.int32(i) for i in range(config.num_layers)],
            )
        )
        self._decode = jit_step(
            self._decode_step, donate_argnames=("state", "positions_B", "caches")
        )
        self._layer = jit_step(
            self._layer_step,
            static_argnames="is_moe",
            donate_argnames=("state", "kv"),
        )
        self._count = jit_step(lambda step: step + 1)
        dtype = self._hosts[config.moe_layers[0]].dtype
        self._record_bytes = layout.size * dtype.itemsize
        self._begin(self._cache_of.init(layout.size, dtype))

    def clear(self) -> None:
        """Empties the cache and its counters; the slots' memory stays the same."""
        self._begin(self._cache_of.empty(self._state.slots_SR))

    def _begin(self, empty: Cache) -> None:
        self._state = self._commit(empty)
        self._counting = Counting(self._state.counts_L3, self._record_bytes)

    def counts(self) -> Counts:
        """What the cache did since it was last cleared; waits for the device."""
        return self._counting.total(self._state.counts_L3)

    def reset_records(self) -> None:
        self._counting.reset(self._state.counts_L3)

    def restart(self) -> None:
        self.clear()

    def movement(self) -> dict:
        return self._counting.movement(self._state.counts_L3)

    def report(self) -> dict:
        route = "topk" if self._route is None else self._route.name
        spec, policy = self._cache_of.spec, self._cache_of.policy
        return {
            "mode": "fused",
            "route": route,
            "lossless": self._route is None or self._route.lossless,
            "slots": spec.num_slots,
            "eviction": policy.name,
            **self.movement(),
        }

    def _commit(self, tree):
        """Says where arrays are, without a copy.

        Arrays in pinned memory have a stated place, and so has what is computed from
        them: without one for the others, a program's second call would compile again.
        """
        return jax.device_put(tree, self._device)

    # Programs.

    def _layer_step(self, is_moe, layer, weights, host_ER, state, x, chunk, window, kv):
        """One layer; `layer` is an int or, so that one program serves all, an array."""
        block = bind_block(self._graphs[is_moe], weights)
        if not is_moe:
            x, kv, _ = block(x, chunk, window, None, None, kv)
            return state, x, kv, None
        x, kv = block.attend(x, chunk, window, kv)
        hidden_TD, routing = seam(block.route(x, chunk))
        shared_TD = seam(block.run_shared(hidden_TD))
        if self._route is not None and x.shape[1] == 1:  # as layered: decoding only
            routing = seam(self._reroute(state, layer, routing))
        moe = self.config.moe
        method = self._method or choose_method(hidden_TD.shape[0], host_ER.dtype)
        state, y_TD = run_through_slots(
            self._cache_of,
            ExpertWaves(
                self._layout, moe.num_experts, method, moe.activation, moe.swiglu_limit
            ),
            state,
            layer,
            hidden_TD,
            routing._replace(scores_TE=gate_scores(routing.scores_TE, moe)),
            host_ER,
        )
        return state, add_experts(x, seam(y_TD), shared_TD), kv, routing

    def _reroute(self, state: Cache, layer, routing):
        resident_E = self._cache_of.slots_of(state, layer) >= 0
        ids_TK, weights_TK = self._route.route(
            layer,
            routing.scores_TE,
            resident_E,
            self.config.moe,
            routing.ids_TK,
            routing.weights_TK,
        )
        return routing._replace(ids_TK=ids_TK, weights_TK=weights_TK)

    def _decode_step(
        self,
        top,
        layers,
        hosts,
        windows,
        state,
        tokens_B,
        positions_B,
        active_B,
        caches,
    ):
        x, chunk, positions_B = self.programs.top.next_embed_step(
            top["embed"], tokens_B, positions_B, active_B
        )
        state = state._replace(step=state.step + 1)
        new_caches, routings = [], []
        for layer, host_ER in enumerate(hosts):
            x, chunk = seam((x, chunk))  # here the resident engine changes programs
            state, x, kv, routing = self._layer_step(
                host_ER is not None,
                layer,
                layers[layer],
                host_ER,
                state,
                x,
                chunk,
                windows[layer],
                caches[layer][0],
            )
            new_caches.append((kv,))
            routings.append(routing)
        logits = self.programs.top.head_step(top, seam(x)[:, 0])
        return logits, state, positions_B, new_caches, routings

    def num_compiled(self) -> int:
        own = (self._decode, self._layer, self._count)
        return super().num_compiled() + sum(program._cache_size() for program in own)

    # Steps.

    def new_session(self, batch: int, capacity: int) -> Session:
        """As `Engine.new_session`; a policy's record of one sequence starts over."""
        session = super().new_session(batch, capacity)
        state = self._state
        if self._cache_of.policy.per_sequence:
            fresh = self._cache_of.policy.init(self._cache_of.spec, xp=jnp)
            policy = self._commit({**fresh, "key_S": state.policy["key_S"]})
            step = self._commit(jnp.int32(-1))
            self._state = state._replace(policy=policy, step=step)
        session.caches = self._commit(session.caches)
        return session

    def _begin_step(self, session: Session, is_decode: bool) -> None:
        if not is_decode:  # decoding counts its own steps
            step = self._count(self._state.step)
            self._state = self._state._replace(step=step)

    def _run_layers(self, session: Session, x, chunk, on_routing):
        weights, state = self.weights, self._state
        self._counting.begin_prefill(state.counts_L3)
        for layer in range(self.config.num_layers):
            is_moe = self._hosts[layer] is not None
            state, x, kv, routing = self._layer(
                is_moe,
                self._layer_ids[layer],
                weights.layers[layer],
                self._hosts[layer],
                state,
                x,
                chunk,
                self._windows[layer],
                session.caches[layer][0],
            )
            session.caches[layer] = (kv,)
            self._state = state
            if on_routing is not None and is_moe:
                on_routing(layer, routing)
        self._counting.end_prefill(state.counts_L3)
        return x

    def decode(self, session: Session, tokens_B, active_B, on_routing=None):
        """As `Engine.decode`, in one program."""
        session.grow([1] * len(session.lengths))
        weights = self.weights
        tokens_B, active_B, session.positions_B = self._commit(
            (tokens_B, active_B, session.positions_B)
        )
        logits, self._state, session.positions_B, session.caches, routings = (
            self._decode(
                weights.top,
                weights.layers,
                self._hosts,
                self._windows,
                self._state,
                tokens_B,
                session.positions_B,
                active_B,
                session.caches,
            )
        )
        if on_routing is not None:
            for layer in self.config.moe_layers:
                on_routing(layer, routings[layer])
        return logits


def pin_records(records_ER: np.ndarray | jax.Array) -> jax.Array:
    """A layer's records in pinned host memory, where the backend has it.

    Args:
      records_ER: in the dtype that programs take (`HostStore.records`). On a CPU the
        result may share its memory: do not write to it afterwards.
    """
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    return jax.device_put(
        records_ER, jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    )
