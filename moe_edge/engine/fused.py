"""The fused engine: a decode step with its expert fetches is one program.

Records of all experts lie in host memory, one array a layer; the device holds slots
and the cache's state (`fused_cache`). Router, table, eviction and transfer are one
program, so the host never waits for a router's choice and dispatches once a step.
Prefill runs one program a layer. On a CPU a step of a deep model is some programs of
equally many layers, which share one where the kinds of their layers are the same: it
compiles as fast as a short model's.

Lossless: seams keep XLA from fusing across the borders at which the resident engine
changes programs, and the experts are summed in the same order (`expert_waves`), so
logits have the same bits at any number of slots.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.engine.base import Engine
from moe_edge.engine.expert_state import ExpertState, Moved
from moe_edge.engine.fused_assist import FusedAssist, measure_costs
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_counts import Counting, Counts, running
from moe_edge.engine.fused_plug_ins import forgiven, what_is_wrong
from moe_edge.engine.fused_prefetch import Prefetch
from moe_edge.engine.fused_programs import FusedPrograms
from moe_edge.engine.fused_refusals import check_fits
from moe_edge.engine.fused_sessions import SessionRecords
from moe_edge.engine.fused_turns import Turns
from moe_edge.engine.fused_zero_copy import ZeroCopy
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist_base import Assist
from moe_edge.offload.evict_base import CacheSpec, Eviction
from moe_edge.offload.slots import is_lost
from moe_edge.predict.stale_gate import DevicePredictor
from moe_edge.route.base import Route, TopK


class FusedEngine(Engine):
    """Runs a model whose experts do not fit the device, at one dispatch a token.

    Args:
      weights: the model; its experts are not used.
      hosts: per layer the records `[E, R]` in host memory (`HostStore.pin_layer`), None
        in dense layers.
      spec: layers, experts and slots of the cache.
      policy: who leaves a full cache; must run inside jit.
      route: chooses what is computed in decoding (None: the model's own choice).
      zero_copy: decode steps run by `fused_zero_copy` where they can.
      in_turns: prompts run by `fused_turns` where they can.
      predictor: names what decode steps fetch ahead (`fused_prefetch`); None: nothing.
      prefetch_limit: most experts that are fetched ahead for a layer.
      assist: by which the host computes absent experts of decode steps
        (`fused_assist`); None: it computes none.
      assist_deferred: whether the next layer adds what it computed, which is lossy.
      device: that runs it; None: the first one.
      layers_per_program: most of a decode step's programs, which get equally many.
        None: 16, which takes no longer than all in one; on a GPU all, as timed there.
    Raises:
      ConfigError: a spec that does not fit the model, a policy for the host, or
        zero_copy where no kernel can.
      CapacityError: a MoE layer without a slot.
    """

    programs: FusedPrograms

    def __init__(
        self,
        weights: Weights,
        hosts: Sequence[jax.Array | None],
        spec: CacheSpec,
        policy: Eviction,
        *,
        route: Route | None = None,
        zero_copy: bool = False,
        in_turns: bool = False,
        predictor: DevicePredictor | None = None,
        prefetch_limit: int = 8,
        assist: Assist | None = None,
        assist_deferred: bool = False,
        device: jax.Device | None = None,
        layers_per_program: int | None = None,
    ):
        config = weights.config
        layout = RecordLayout.of(config)
        check_fits(spec, config, hosts)
        self._device = device or jax.local_devices()[0]
        given = spec, policy, config.moe_layers
        self._cache_of = cache_of = DeviceCache(*given, predictor is not None)
        self._assist = None
        if assist is not None:
            costs = measure_costs(config, hosts[config.moe_layers[0]])
            self._assist = FusedAssist(cache_of, config, assist, costs, assist_deferred)
        given = cache_of, config, self._assist
        self._zero_copy = ZeroCopy(*given) if zero_copy else None
        self._prefetch = None
        if predictor is not None:
            self._prefetch = Prefetch(cache_of, config, predictor, prefetch_limit)
        self._route = route or TopK()
        super().__init__(
            dataclasses.replace(
                weights,
                top=self.put(weights.top),
                layers=self.put(weights.layers),
                experts=(None,) * config.num_layers,
            ),
            FusedPrograms(
                *(config, cache_of, self._route),
                *(self._zero_copy, self._prefetch, self._assist),
                Turns(cache_of) if in_turns else None,
            ),
        )
        self._windows = self.put(self._windows)
        self._layer_ids = self.put([*np.arange(config.num_layers, dtype=np.int32)])
        some = config.num_layers if jax.default_backend() == "gpu" else 16
        programs = -(-config.num_layers // (layers_per_program or some))
        self._layers_per_program = -(-config.num_layers // programs)
        # What a layer's program takes of the model: weights, records, window.
        self._layers = [*zip(self.weights.layers, hosts, self._windows, strict=True)]
        of_layer = self._prefetch.gates if self._prefetch is not None else lambda _: ()
        gates = map(self.put, map(of_layer, range(config.num_layers)))
        self._with_gates = [(*arguments, next(gates)) for arguments in self._layers]
        dtype = hosts[config.moe_layers[0]].dtype
        self._record_bytes = layout.num_bytes(dtype)
        self._begin(cache_of.empty(cache_of.new_slots(layout.size, dtype)))

    @property
    def lossless(self) -> bool:
        return self._route.lossless and not (self._assist and self._assist.defers)

    def clear(self) -> None:
        """Empties the cache and its counters; the slots' memory stays the same."""
        self._begin(self._cache_of.empty(self._state.slots_SR))

    def _begin(self, empty: Cache) -> None:
        if not is_ours(self._route):
            empty = empty._replace(refused=jnp.int32(0))
        if self._assist is not None:
            empty = self._assist.empty(empty)
        self._state = self.put(empty)
        self._sessions = SessionRecords(self._cache_of)
        self._counting = Counting(self._state, self._record_bytes, self._cache_of)

    def counts(self) -> Counts:
        """What the cache did since it was last cleared; waits for the device."""
        return Counts(*np.array(self._state.counts_L3, np.int64).T)

    def reset_records(self) -> None:
        self._counting.reset(self._state)

    restart = clear

    def recover(self) -> None:
        before = self._state  # donated to every program: an error may have taken it
        slots_SR, counts, counting = before.slots_SR, running(before), self._counting
        if is_lost(slots_SR):
            like = jax.tree.leaves(slots_SR)[0]
            slots_SR = self._cache_of.new_slots(like.shape[1], like.dtype)
        self._begin(self._cache_of.empty(slots_SR))
        if not is_lost(counts):
            self._state, self._counting = self._state._replace(**counts), counting

    def movement(self) -> dict:
        return self._counting.movement(self._state)

    def moved(self) -> Moved:
        return self._counting.moved(self._state)

    def device_bytes(self) -> int:
        slots = jax.tree.leaves(self._state.slots_SR)
        return self.weights.num_bytes + sum(each.nbytes for each in slots)

    def expert_state(self) -> ExpertState:
        return self._counting.expert_state(self._state)

    def report(self) -> dict:
        mode = {"mode": "fused", "route": self._route.name, "lossless": self.lossless}
        if not self._route.lossless:
            counted = self.moved()
            mode |= {"choices": counted.routed, "rerouted": counted.substituted}
        if self._assist is not None:
            helped = self._counting.helped(self._state)
            mode |= self._assist.report(helped, self._record_bytes)
        return mode | {
            "slots": self._cache_of.spec.num_slots,
            "eviction": self._cache_of.policy.name,
            "zero_copy": self._zero_copy is not None and not self._zero_copy.hindrance,
            "prefetch": self._prefetch and self._prefetch.predictor.name,
            "overlap": bool((turns := self.programs.turns) and turns.is_somewhere),
            **self.movement(),
        }

    def remarks(self) -> list[str]:
        zero_copy, turns = self._zero_copy, self.programs.turns
        found = [] if turns is None else turns.remarks()
        if zero_copy is not None and (why := zero_copy.hindrance) is not None:
            found.append(f"zero_copy is off, experts are fetched by a loop: {why}")
        return found

    def put(self, tree):
        """Says where arrays are, without a copy.

        Arrays in pinned memory have a stated place, and so has what is computed from
        them: without one for the others, a program's second call would compile again.
        """
        return jax.device_put(tree, self._device)

    def check_rows(self, deterministic: bool = False) -> None:
        given = {"eviction": self._cache_of.policy, "route": self._route}
        given |= {"is_assisted": self._assist is not None}
        refuse(Asked(**given, has_rows=True, deterministic=deterministic))

    def begin_prompts(self, session: Session, prompts) -> None:
        self._turn_to(session)
        step = self.programs.count(self._state.step)  # decoding counts its own steps
        self._state = self._state._replace(step=step)

    def _turn_to(self, session: Session) -> None:
        state = self._sessions.turn_to(session, self._state)
        if state is not self._state:
            self._state = self.put(state)

    def _run_layers(self, session: Session, x, chunk, on_routing):
        self._turn_to(session)  # prompts of several chunks may take turns too
        self._counting.begin_prefill(self._state.counts_L3)
        for layer, arguments in enumerate(self._layers):
            number, cache = self._layer_ids[layer], session.caches[layer]
            kind, before = self.programs.kinds[layer], self._state
            state, x, session.caches[layer], routing = self.programs.layer(
                kind, before.at(layer), x, chunk, number, *arguments, cache
            )
            self._state = before.after(layer, state)
            if on_routing is not None and routing is not None:
                on_routing(layer, routing)
        self._counting.end_prefill(self._state.counts_L3)
        self._check_plug_ins()
        return x

    def decode(self, session: Session, tokens_B, active_B, on_routing=None):
        """As `Engine.decode`, in one program, or one a group of layers."""
        session.grow(session.growth)
        self._turn_to(session)
        tokens_B, active_B, session.positions_B, session.k_B = self.put(
            (tokens_B, active_B, session.positions_B, session.k_B)
        )
        if len(self._layers) > self._layers_per_program:
            logits, routings = self._decode_by_groups(session, tokens_B, active_B)
        else:
            given = self.weights.top, self._with_gates, self._state
            rows = tokens_B, session.positions_B, active_B, session.k_B
            step = self.programs.decode(*given, *rows, session.caches)
            logits, self._state, session.positions_B, session.caches, routings = step
        if on_routing is not None:
            for layer in self.config.moe_layers:
                on_routing(layer, routings[layer])
        self._check_plug_ins()
        return logits

    def _decode_by_groups(self, session: Session, tokens_B, active_B):
        top, size, routings = self.programs.top, self._layers_per_program, []
        rows = tokens_B, session.positions_B, active_B, session.k_B
        x, chunk, session.positions_B = top.next_embed(self.weights.top["embed"], *rows)
        self._state = self._state._replace(step=self.programs.count(self._state.step))
        for first in range(0, len(self._layers), size):
            here, before = slice(first, first + size), self._state
            state, x, session.caches[here], found = self.programs.group(
                self.programs.kinds[here],
                self._layer_ids[here],
                before.at(here),
                x,
                chunk,
                self._with_gates[here],
                session.caches[here],
            )
            self._state = before.after(here, state)
            routings += found
        return top.next_head(self.weights.top, x), routings

    def _check_plug_ins(self) -> None:
        """Refuses a policy that gave up a slot it may not, or a route that chose what
        cannot be computed; ours are not asked.

        The step is done, and right: another slot, or the model's own choice, was taken.
        """
        given = self._cache_of.policy, self._route, self.config.moe.num_experts
        if (found := what_is_wrong(self._state, *given)) is not None:
            self._state = self.put(forgiven(self._state))
            raise ConfigError(found)
