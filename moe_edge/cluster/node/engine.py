"""The engine of a server: its blocks in slots, the others' rows by calls.

Steps are the layered engine's, cut at every router. A layer with all chosen blocks here
is one program, as there. Otherwise calls go out first, the pairs whose blocks are here
are computed meanwhile, and rows from elsewhere are put in their places before the sum.
Lossless: the same rows, added in the same order. But a lossy route takes what is here
for what is in slots: in decoding a call may become a local substitute.
"""

import jax
import numpy as np

from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.cluster.node.holdings import Holdings
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote, cut
from moe_edge.cluster.node.tables import HERE, View
from moe_edge.engine.base import Engine
from moe_edge.engine.expert_state import Moved
from moe_edge.engine.layer_exchange import Arrays, Placed
from moe_edge.engine.layer_programs import Routed
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights, load_weights
from moe_edge.route.base import Route, TopK, host_choice


def dense_weights(reader) -> Weights:
    """All of an open checkpoint's model but its experts."""
    foreign = not isinstance(reader, CheckpointReader)
    return load_weights(reader, check_finite=foreign, with_experts=False)


class PlacedEngine(Engine):
    """Runs a model whose blocks are on several servers.

    Args:
      weights: all but the experts.
      remote: calls others; its tables say whom.
      ledger: notes lookups; one engine thread writes it.
      route: chooses what is computed in decoding (None: the model's own choice).
    """

    programs: PlacedPrograms

    def __init__(
        self,
        weights: Weights,
        holdings: Holdings,
        remote: Remote,
        ledger: Ledger,
        programs: PlacedPrograms,
        route: Route | None = None,
    ):
        self._placed = Arrays() if programs.device is None else Placed(programs.device)
        super().__init__(self._placed.weights(weights), programs)
        self._windows = self._placed.windows(self._windows)
        self.remote, self.holdings, self.ledger = remote, holdings, ledger
        self.route = route or TopK()
        self._asks_route = type(self.route) is not TopK
        self._routed = self._substituted = 0
        self._is_moe = [i in self.config.moe_layers for i in range(len(self._windows))]
        self._nothing: dict[int, np.ndarray] = {}  # rows where none is computed here

    @property
    def lossless(self) -> bool:
        return self.route.lossless

    def put(self, tree):
        return self._placed.put(tree)

    def moved(self) -> Moved:
        return Moved(routed=self._routed, substituted=self._substituted)

    def reset_records(self) -> None:
        self._routed = self._substituted = 0

    def check_rows(self, deterministic: bool = False) -> None:
        refuse(Asked(route=self.route, has_rows=True, deterministic=deterministic))

    def begin_prompts(self, session: Session, prompts) -> None:
        self._view: View = self.remote.tables.view

    def _begin_tokens(self, session: Session, tokens_B, active_B) -> None:
        self._view = self.remote.tables.view

    def _run_layers(self, session, x, chunk, on_routing):
        self.ledger.chunk()
        state, last = self._attend(session, 0, x, chunk), self.config.num_layers - 1
        for layer, is_moe in enumerate(self._is_moe):
            if is_moe:
                if on_routing is not None:
                    on_routing(layer, state.routing)
                state = self._moe_layer(session, layer, state, chunk)
            elif layer < last:
                state = self._attend(session, layer + 1, state, chunk)
        return state

    def _layer_arguments(self, session, layer: int, chunk) -> tuple:
        params, window = self.weights.layers[layer], self._windows[layer]
        return params, (), chunk, window, session.caches[layer]

    def _attend(self, session, layer: int, x, chunk):
        arguments = self._layer_arguments(session, layer, chunk)
        kind = self.programs.kinds[layer]
        state, session.caches[layer] = self.programs.attend(kind, x, *arguments)
        return state

    def _moe_layer(self, session, layer: int, routed: Routed, chunk):
        """Experts of a layer, wherever they are, and the next layer's attention."""
        programs, ids_TK = self.programs, np.asarray(routed.routing.ids_TK)
        view = self._layer_view(layer, ids_TK)
        if self._asks_route and chunk.valid_BS.shape[1] == 1:
            routed = self._rerouted(view, layer, routed, ids_TK)
            ids_TK = np.asarray(routed.routing.ids_TK)
        routing = routed.routing
        weights_TK = np.asarray(routing.weights_TK)
        pairs = programs.is_pairs(len(ids_TK))
        slot_of = view.slot_LE[layer][ids_TK] if pairs else view.slot_LE[layer][:-1]
        parts = []
        if not view.all_here_L[layer]:
            parts = cut(ids_TK, view.asked_LE[layer], in_order=pairs)
        if not parts and programs.device is not None:
            rows = (routed, self._rows_here(routed, slot_of))
            state = self._then(session, layer, programs.join, rows, chunk)
        elif not parts:
            with self.holdings.lock:
                chosen = (routed, slot_of, routing.weights_TK, self.holdings.array)
                state = self._then(session, layer, programs.experts, chosen, chunk)
        else:
            rows = self._gather(view, layer, routed, ids_TK, slot_of, parts)
            state = self._then(session, layer, programs.join, (routed, *rows), chunk)
        self.ledger.looked_up(layer, ids_TK, weights_TK, view)
        return state

    def _layer_view(self, layer: int, ids_TK: np.ndarray) -> View:
        """Who computes what a layer has chosen."""
        return self._view

    def _rerouted(self, view: View, layer: int, routed: Routed, own_TK) -> Routed:
        """The layer by the route's choice, for which the blocks here are in slots."""
        moe, routing = self.config.moe, routed.routing
        here_E = view.asked_LE[layer][:-1] == HERE
        self._routed += int(np.count_nonzero(own_TK < moe.num_experts))
        scores_TE, weights_TK = map(np.asarray, (routing.scores_TE, routing.weights_TK))
        given = scores_TE, here_E, moe, own_TK, weights_TK
        ids_TK, weights_TK = host_choice(self.route, layer, *given)
        if ids_TK is own_TK:
            return routed
        self._substituted += int(np.count_nonzero(ids_TK != own_TK))
        ids_TK, weights_TK = self.put((ids_TK, weights_TK))
        changed = routing._replace(ids_TK=ids_TK, weights_TK=weights_TK)
        return routed._replace(routing=changed)

    def _then(self, session, layer: int, experts, chosen, chunk):
        """Dispatches a layer's experts, with the next layer's attention if any."""
        following, programs = layer + 1, self.programs
        if following == self.config.num_layers:
            return experts(*chosen)
        both = (
            programs.advance if experts == programs.experts else programs.join_advance
        )
        arguments = self._layer_arguments(session, following, chunk)
        kind = programs.kinds[following]
        state, session.caches[following] = both(kind, chosen, *arguments)
        return state

    def _gather(self, view, layer, routed, ids_TK, slot_of, parts):
        """What `PlacedPrograms.join` needs of a layer, from here and elsewhere."""
        size, hidden_TD = ids_TK.size, np.asarray(routed.hidden_TD)
        outgoing = self.remote.start(layer, view, parts, len(ids_TK), hidden_TD)
        here = self._here(layer, routed, ids_TK, slot_of, parts, size)
        away_PD = np.zeros((size, self.config.d_model), np.float32)
        self.remote.finish(outgoing, away_PD)
        away_P = np.zeros(size, bool)
        for part in parts:
            away_P[part.place_P] = True
        if self.programs.is_pairs(len(ids_TK)):
            return here, away_PD, away_P
        return (self.programs.merge(here, away_PD, away_P),)

    def _here(self, layer, routed, ids_TK, slot_of, parts, size: int) -> jax.Array:
        """Dispatches what is computed here; returns at once."""
        sent = sum(len(part.place_P) for part in parts)
        real = np.count_nonzero(ids_TK < self.config.moe.num_experts)
        if sent == real:
            if size not in self._nothing:
                zeros = np.zeros((size, self.config.d_model), np.float32)
                self._nothing[size] = self.put(zeros)
            return self._nothing[size]
        return self._rows_here(routed, slot_of)

    def _rows_here(self, routed: Routed, slot_of) -> jax.Array:
        programs, routing = self.programs, routed.routing
        with self.holdings.lock:
            slots_SR = self.holdings.array
            where = routing.ids_TK, slots_SR, slot_of
            return programs.rows(routed.hidden_TD, *where)
