"""The programs of a fused engine: a layer, some layers, and a whole decode step.

Seams keep XLA from fusing across the borders at which the resident engine changes
programs, and the experts are summed in the same order (`expert_waves`).
"""

import jax.numpy as jnp

from moe_edge.core.checks import check_shape
from moe_edge.engine.fused_assist import FusedAssist, Helped, HelpedWaves
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_prefetch import Coming, Prefetch, Then, UnderWay, behind
from moe_edge.engine.fused_turns import Turns
from moe_edge.engine.fused_waves import run_through_slots, sum_of_present
from moe_edge.engine.fused_zero_copy import ZeroCopy
from moe_edge.engine.programs import Programs, jit_step
from moe_edge.model.branches import add_experts, seam
from moe_edge.model.config import ModelConfig
from moe_edge.route.base import Route, TopK, gate_scores, sound_choice


class FusedPrograms(Programs):
    """Programs of one model over one cache; its state goes through all of them.

    Args:
      route: chooses what is computed in decoding.
      zero_copy: runs decode steps where it can; None: nothing does.
      prefetch: what decode steps fetch ahead; None: nothing.
      assist: has the host compute absent experts of decode steps; None: it does not.
      turns: runs prompts of many rows; None: the loop does.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: DeviceCache,
        route: Route,
        zero_copy: ZeroCopy | None,
        prefetch: Prefetch | None,
        assist: FusedAssist | None,
        turns: Turns | None,
    ):
        super().__init__(config)
        self._assist, self.turns = assist, turns
        self._cache, self._route = cache, route
        self._zero_copy, self._prefetch = zero_copy, prefetch
        self.decode = jit_step(
            self._decode_step, donate_argnames=("state", "positions_B", "caches")
        )
        self.group = jit_step(
            self._group_step, static_argnums=0, donate_argnames=("state", "caches")
        )
        self.layer = jit_step(
            self._layer_step, static_argnums=0, donate_argnames=("state", "kv")
        )
        self.count = jit_step(lambda step: step + 1)

    def _layer_step(self, kind, state, x, chunk, layer, weights, host_ER, window, kv):
        """One layer; `layer` is an int or, so that one program serves all, an array."""
        given = kind, state, x, chunk, layer, weights, host_ER, window, kv
        return self._run_layer(*given, None, None, None, True)[0]

    def _run_layer(
        self,
        kind,
        state,
        x,
        chunk,
        layer,
        weights,
        host_ER,
        window,
        kv,
        under_way: UnderWay | None,
        coming: Coming | None,
        deferred: Helped | None,
        is_last: bool,
    ):
        """One layer.

        Args:
          under_way: what was begun for it.
          coming: the layer for which it begins to fetch.
          deferred: what the host computes of an earlier layer, which this one adds.
          is_last: of those with experts in the program.
        Returns:
          ((state, x, kv, routing), what is under way for the next layer, what it is to
          add).
        """
        block = self.bind(kind, weights)
        if host_ER is None:
            x, kv, _ = block(x, chunk, window, None, None, kv)
            return (state, x, kv, None), None, deferred
        if under_way is not None and under_way.kv is not None:
            kv = under_way.kv
        (x, normed), kv = block.attend(x, chunk, window, kv)
        hidden_TD, routing = seam(block.route(normed, chunk))
        shared = seam(block.run_shared(hidden_TD, routing))
        taken_TD = block.expert_input(hidden_TD, routing)
        if self._prefetch is not None:
            state, routing = self._prefetch.end(state, under_way, routing)
        if type(self._route) is not TopK and x.shape[1] == 1:  # in decoding only
            state, routing = self._reroute(state, layer, routing)

        k_T = chunk.k_T(self.config.moe.top_k)
        shares_TE = gate_scores(routing.scores_TE, self.config.moe)
        wanted, zero_copy = routing._replace(scores_TE=shares_TE), self._zero_copy
        plain = waves = self.waves_of(taken_TD.shape[0], host_ER.dtype)
        given, helped, assist = (layer, taken_TD, wanted, host_ER), None, self._assist
        if x.shape[1] == 1 and assist is not None and assist.suits(waves, taken_TD):
            state, helped = assist.begin(state, *given, is_last)
            waves = HelpedWaves(waves, assist, helped, wanted)
        expected, turns = None, self.turns if x.shape[1] > 1 else None  # of prompts
        if coming is not None and coming.then is not None:
            here = wanted if helped is None else wanted._replace(ids_TK=helped.ids_TK)
            given = self._cache, plain, state, layer, taken_TD, here
            part_TD, travels = sum_of_present(*given)
            partial = add_experts(self.config, x, seam(part_TD), shared)
            given = coming, coming.then, partial, travels
            expected = self._prefetch.peeked(*given)
            # Slots are read before the look-up's loop, which writes in place.
            wanted = wanted._replace(ids_TK=behind(expected, wanted.ids_TK))
        elif coming is not None:
            expected = self._prefetch.expected(coming, hidden_TD, taken_TD, k_T)
        given = state, layer, taken_TD, wanted, host_ER, expected, helped
        if zero_copy is not None and zero_copy.suits(layer, wanted.ids_TK):
            state, y_TD, begun = zero_copy.run(*given)
        elif turns is not None and turns.suits(plain, state, wanted.ids_TK):
            # Nobody helps a prompt, and nothing is fetched ahead in it.
            (state, y_TD), begun = turns.run(plain, *given[:5]), None
        else:
            state, y_TD, begun = run_through_slots(self._cache, waves, *given)
        if deferred is not None:
            y_TD = assist.add(y_TD, deferred)
        x = add_experts(self.config, x, seam(y_TD), shared)
        left = helped if helped is not None and helped.is_deferred else None
        return (state, x, kv, routing), begun, left

    def _coming(self, gates, kind, number, layer, kv, slots_SR, chunk) -> Coming | None:
        """The next layer, with all that is its own; None: nothing is fetched for it.

        Args:
          gates: of the layer before.
        """
        weights, host_ER, window, _ = layer
        peeks = self._prefetch.peeks and host_ER is not None
        if not gates and not peeks:
            return None
        if self._prefetch.most(slots_SR, len(chunk.valid_BS)) == 0:
            return None
        then = Then(self.bind(kind, weights), chunk, window, kv) if peeks else None
        return Coming(gates, number, host_ER, slots_SR, then)

    def _reroute(self, state: Cache, layer, routing):
        resident_E = self._cache.slots_of(state, layer) >= 0
        ids_TK, weights_TK = self._route.route(
            layer,
            routing.scores_TE,
            resident_E,
            self.config.moe,
            routing.ids_TK,
            routing.weights_TK,
        )
        if state.refused is not None:  # another author's: nothing else is to be read
            state, ids_TK, weights_TK = self._take_sound(
                state, (ids_TK, weights_TK), routing
            )
        real_TK = routing.ids_TK < self.config.moe.num_experts
        counts = jnp.sum(real_TK), jnp.sum(ids_TK != routing.ids_TK)
        counts_2 = jnp.stack(counts).astype(jnp.int32)
        state = state._replace(choices_2=state.choices_2 + counts_2)
        return state, seam(routing._replace(ids_TK=ids_TK, weights_TK=weights_TK))

    def _take_sound(self, state: Cache, found, routing):
        """A route's choice; the model's own where that one cannot be computed."""
        shape_TK, E = routing.ids_TK.shape, self.config.moe.num_experts
        for name, array in zip(("ids_TK", "weights_TK"), found, strict=True):
            check_shape(f"{name} of route {self._route.name}", array, shape_TK)
        own = routing.ids_TK, routing.weights_TK
        ids_TK, weights_TK, bad = sound_choice(found, own, E)
        return state._replace(refused=state.refused + bad), ids_TK, weights_TK

    def _decode_step(
        self, top, layers, state, tokens_B, positions_B, active_B, k_B, caches
    ):
        x, chunk, positions_B = self.top.next_embed_step(
            top["embed"], tokens_B, positions_B, active_B, k_B
        )
        state = state._replace(step=state.step + 1)
        parts = range(len(layers)), state, x, chunk, layers, caches
        state, x, caches, routings = self._group_step(self.kinds, *parts)
        logits = self.top.head_step(top, seam(x)[:, 0])
        return logits, state, positions_B, caches, routings

    def _group_step(self, kinds, numbers, state, x, chunk, layers, caches):
        """Some layers of a decode step, by number; see `_run_layer`."""
        new_caches, routings, under_way, deferred = [], [], None, None
        last = max(
            (i for i, (_, host_ER, *_) in enumerate(layers) if host_ER is not None),
            default=0,
        )
        for place, (kind, number) in enumerate(zip(kinds, numbers, strict=True)):
            x, chunk = seam((x, chunk))  # here the resident engine changes programs
            *layer, gates = layers[place]
            coming, after = None, place + 1
            if self._prefetch is not None and after < len(layers):
                given = kinds[after], numbers[after], layers[after], caches[after]
                coming = self._coming(gates, *given, state.slots_SR[after], chunk)
            given = kind, state.at(place), x, chunk, number, *layer, caches[place]
            (here, x, kv, routing), under_way, deferred = self._run_layer(
                *given, under_way, coming, deferred, place == last
            )
            state = state.after(place, here)
            new_caches.append(kv)
            routings.append(routing)
        return state, x, new_caches, routings
