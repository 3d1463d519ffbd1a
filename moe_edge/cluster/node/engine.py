"""The engine of a server: its blocks in slots, the others' rows by calls.

Steps are the layered engine's, cut at every router. A layer with all chosen blocks here
is one program, as there. Otherwise calls go out first, the pairs whose blocks are here
are computed meanwhile, and rows from elsewhere are put in their places before the sum.
Lossless with exact sums: the same rows, added in the same order.
"""

import jax
import numpy as np

from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.cluster.node.holdings import Holdings
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote, cut
from moe_edge.cluster.node.tables import View
from moe_edge.engine.base import Engine
from moe_edge.engine.layer_exchange import Arrays, Placed
from moe_edge.engine.layer_programs import Routed
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Weights, load_weights


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
    """

    programs: PlacedPrograms

    def __init__(
        self,
        weights: Weights,
        holdings: Holdings,
        remote: Remote,
        ledger: Ledger,
        programs: PlacedPrograms,
    ):
        self._placed = Arrays() if programs.device is None else Placed(programs.device)
        super().__init__(self._placed.weights(weights), programs)
        self._windows = self._placed.windows(self._windows)
        self.remote, self.holdings, self.ledger = remote, holdings, ledger
        self._is_moe = [i in self.config.moe_layers for i in range(len(self._windows))]
        self._nothing: dict[int, np.ndarray] = {}  # rows where none is computed here

    def put(self, tree):
        return self._placed.put(tree)

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
        programs, routing = self.programs, routed.routing
        ids_TK = np.asarray(routing.ids_TK)
        view = self._layer_view(layer, ids_TK)
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
            rows = self._gather(view, layer, routed, ids_TK, weights_TK, slot_of, parts)
            state = self._then(session, layer, programs.join, (routed, *rows), chunk)
        self.ledger.looked_up(layer, ids_TK, weights_TK, view)
        return state

    def _layer_view(self, layer: int, ids_TK: np.ndarray) -> View:
        """Who computes what a layer has chosen."""
        return self._view

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

    def _gather(self, view, layer, routed, ids_TK, weights_TK, slot_of, parts):
        """What `PlacedPrograms.join` needs of a layer, from here and elsewhere."""
        partial, size = self.remote.partial, ids_TK.size
        weights_P = None
        if partial:
            order_P = slice(None)
            if not self.programs.is_pairs(len(ids_TK)):
                order_P = ids_TK.reshape(-1).argsort(kind="stable")
            weights_P = weights_TK.reshape(-1)[order_P]
            size = len(ids_TK)
        hidden_TD = np.asarray(routed.hidden_TD)
        outgoing = self.remote.start(
            layer, view, parts, len(ids_TK), hidden_TD, weights_P
        )
        here = self._here(layer, routed, ids_TK, slot_of, parts, size)
        away_PD = np.zeros((size, self.config.d_model), np.float32)
        self.remote.finish(outgoing, away_PD)
        if partial:
            return here, away_PD
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
            if self.remote.partial:
                weights_TK = routing.weights_TK
                where = routing.ids_TK, weights_TK, slots_SR, slot_of
                return programs.part(routed.hidden_TD, *where)
            where = routing.ids_TK, slots_SR, slot_of
            return programs.rows(routed.hidden_TD, *where)
