"""The session of a running batch: rows in places, of few sizes of batch and capacity.

It grows as rows join and lengthen, and shrinks when the rows left need less, by
copying their caches into another session: a step's time follows rows and capacity.

Where nothing is known to change, the next step begins before this one's tokens are
read: the device computes while Python tells them to whoever asked. Who joined or left
meanwhile takes no harm: a row has the same values in any company (the same bits where
all steps have one shape). A row that left is ignored, and a step begun at another K, or
before a row joined, is run again: so no step begins early where layers keep states.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.session import Session
from moe_edge.engine.slot_programs import SlotPrograms, SlotShapes
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.model.new_token import NewToken
from moe_edge.model.row_sampling import Rules, make_rules
from moe_edge.model.sampling import Sampling

Rows = Sequence[SlotRow | None]  # by place; None: nobody asks
_IDLE = Sampling(), 0


class _Begun(NamedTuple):
    """A step that runs ahead: its logits, rows by place, and their K."""

    logits_BV: jax.Array
    rows: list[SlotRow | None]
    ks: list[int]


class SlotBatch:
    """Rows that decode together, over an engine."""

    def __init__(self, engine: Engine, programs: SlotPrograms, shapes: SlotShapes):
        self._engine, self._programs, self._shapes = engine, programs, shapes
        self.session: Session | None = None
        self.places: list[SlotRow | None] = []
        self._numbers: list[int] = []  # sequences of the places while nobody is there
        self.changed = True  # the device does not know the rows as they are
        self._tokens_B = self._active_B = self._rules = None
        self._begun: _Begun | None = None

    @property
    def rows(self) -> list[SlotRow]:
        return [row for row in self.places if row is not None]

    def insert(
        self, through: Rows, logits_BV: jax.Array, session: Session
    ) -> list[NewToken]:
        """Copies rows out of the prompts' session into free places.

        Args:
          through: of its places; logits_BV: after their last tokens.
        Returns:
          their first tokens.
        """
        rules = _rules_of(through, self._engine)
        new, *_ = self._next_tokens(logits_BV, through, rules)
        places = [place for place, row in enumerate(through) if row is not None]
        rows = [through[place] for place in places]
        self._begun = None
        if not self._suits(rows):
            self._resize(rows)
        moves = [
            (self._seat(row, self.places.index(None)), place, row.length)
            for row, place in zip(rows, places, strict=True)
        ]
        pairs = zip(self.session.caches, session.caches, strict=True)
        self.session.caches = [
            self._copy(layer, *pair, moves) for layer, pair in enumerate(pairs)
        ]
        return new

    def remove(self, row: SlotRow) -> None:
        """A row's place is free."""
        self.session.sequences[row.place] = self._numbers[row.place]
        self.places[row.place], row.place = None, None
        self.changed = True

    def decode(self, may_shrink: bool = True, on_routing=None) -> list[NewToken]:
        """A token of every active row; `on_routing` as in `Engine.chunks`."""
        begun = self._take_begun()
        if not any(row.is_active for row in self.rows):
            return []
        if begun is None:
            is_full = self._sizes(self.rows)[1] > self.session.capacity
            if is_full or (may_shrink and self.changed and not self._suits()):
                self._resize()
            begun = self._begin(on_routing)
        rows = [row if row and row.place is not None else None for row in begun.rows]
        may_begin = may_shrink and on_routing is None and self._is_steady(rows)

        def begin_next(tokens_B) -> None:
            if may_begin:
                self._tokens_B = tokens_B
                self._begun = self._begin()

        new, self._tokens_B, self._rules = self._next_tokens(
            begun.logits_BV, rows, self._rules, begin_next
        )
        for row in rows:
            if row is not None:
                row.length += 1
                self.changed |= not row.is_active
        return new

    def _next_tokens(
        self,
        logits_BV: jax.Array,
        rows: Rows,
        rules: Rules | None,
        meanwhile: Callable[[jax.Array], None] = lambda tokens_B: None,
    ) -> tuple[list[NewToken], jax.Array, Rules | None]:
        """Every row's next token, a forced or a drawn one; waits for the device.

        What a row's guide allows after its token is asked at the end, while the device
        computes what `meanwhile` gave it.

        Args:
          meanwhile: gives the device more to do before this waits for the tokens.
        Returns:
          (tokens of the rows, the same as int32 [B] on the device, rules of the next
          step).
        """
        programs, put, may_come_BV = self._programs, self._engine.put, logits_BV
        guided = [row and row.guide and row.emitted >= 0 for row in rows]
        if any(guided):
            bits_BW = np.full((len(rows), -(-logits_BV.shape[1] // 32)), ~np.uint32(0))
            for place, row in enumerate(rows):
                if guided[place]:
                    bits_BW[place] = row.allowed(bits_BW.shape[1])
            may_come_BV = programs.allow(logits_BV, put(bits_BW))
        if rules is None:
            tokens_B = programs.greedy(may_come_BV)
        else:
            tokens_B, rules = programs.draw(may_come_BV, rules)
        forced = {
            place: row.next_forced
            for place, row in enumerate(rows)
            if row is not None and row.emitted < 0
        }
        if forced:
            given_B = np.array(tokens_B)
            given_B[[*forced]] = [*forced.values()]
            tokens_B = put(given_B)
        asked = any(row and row.top_logprobs is not None for row in rows)
        found = programs.log_probs(logits_BV, tokens_B) if asked else ()
        meanwhile(tokens_B)
        tokens, found = np.asarray(tokens_B).tolist(), jax.device_get(found)
        new = []
        for place, row in enumerate(rows):
            if row is None:
                continue
            row.tokens.append(tokens[place])
            score = None
            if row.top_logprobs is not None:
                (score,) = row.scores([each[place : place + 1] for each in found])
            new.append(NewToken(row.id, tokens[place], score, place in forced))
            if guided[place]:
                row.guide.accept(tokens[place])
                row.allowed_W = None
                row.allowed(bits_BW.shape[1])
        return new, tokens_B, rules

    def _begin(self, on_routing=None) -> _Begun:
        """Gives the device the next step of the active rows."""
        rows = [row if row and row.is_active else None for row in self.places]
        if self.changed:
            self._tell(rows)
        logits_BV = self._engine.decode(
            self.session, self._tokens_B, self._active_B, on_routing
        )
        return _Begun(logits_BV, rows, [row.k if row else 0 for row in rows])

    def _take_begun(self) -> _Begun | None:
        """The step that runs ahead, if it is still what is to be computed."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        stay = [
            (row, k)
            for row, k in zip(begun.rows, begun.ks, strict=True)
            if row is not None and row.place is not None
        ]
        if stay and all(row.k == k for row, k in stay):
            return begun
        self.changed = True  # the device's positions are a step ahead of the rows
        return None

    def _is_steady(self, rows: Rows) -> bool:
        """Whether the step after this one is of the same rows in the same session."""
        active = [row for row in rows if row is not None]
        return (
            self._engine.may_discard
            and not self.changed
            and all(0 <= row.emitted < row.max_new_tokens - 1 for row in active)
            and max(row.length for row in self.rows) + 2 <= self.session.capacity
        )

    def _suits(self, more: Sequence[SlotRow] = ()) -> bool:
        """Whether the session is of the size that its rows and more of them need."""
        wanted = self._sizes([*self.rows, *more])
        return self.session is not None and wanted == (
            len(self.places),
            self.session.capacity,
        )

    def _sizes(self, rows: Sequence[SlotRow]) -> tuple[int, int]:
        # A step writes behind the last token of every row, also of those that rest.
        need = max(row.length for row in rows) + 1
        return self._shapes.rows_for(len(rows)), self._shapes.capacity_for(need)

    def _resize(self, more: Sequence[SlotRow] = ()) -> None:
        """Another session for the running rows and more.

        Layer by layer: never is there more than one of them twice
        (`SlotShapes.peak_bytes`).
        """
        rows, old = self.rows, self.session
        B, M = self._sizes([*rows, *more])
        new = self._shapes.new_session(self._engine, B, M, with_caches=False)
        self.session, self._numbers = new, list(new.sequences)
        self.places = [None] * B
        moves = [(place, row.place, row.length) for place, row in enumerate(rows)]
        for place, row in enumerate(rows):
            self._seat(row, place)
        for layer in range(self._engine.config.num_layers):
            cache = self._engine.new_cache(layer, B, new.capacity)
            if old is not None:
                cache = self._copy(layer, cache, old.caches[layer], moves)
                old.caches[layer] = None
            new.caches.append(jax.block_until_ready(cache))

    def _copy(self, layer: int, cache, other, moves):
        return self._programs.copy_rows(layer, cache, other, moves, self._shapes.part)

    def _seat(self, row: SlotRow, place: int) -> int:
        """Gives a row a place, before its cache is copied there."""
        row.place, self.places[place] = place, row
        self.session.sequences[place] = row.sequence
        self.changed = True
        return place

    def _tell(self, rows: Rows) -> None:
        """Tells the device who runs, at what K and by which rule."""
        session, put = self.session, self._engine.put
        session.lengths = [0 if row is None else row.length for row in self.places]
        session.growth = [int(row is not None) for row in rows]
        tokens = [0 if row is None else row.tokens[-1] for row in rows]
        ks = [1 if row is None else row.k for row in rows]
        session.positions_B = put(np.array(session.lengths, np.int32))
        session.k_B = put(np.array(ks, np.int32))
        self._tokens_B = put(np.array(tokens, np.int32))
        self._active_B = put(np.array([row is not None for row in rows]))
        self._rules = _rules_of(rows, self._engine)
        self.changed = False


def _rules_of(rows: Rows, engine: Engine) -> Rules | None:
    """How rows draw next, on the device; None if all are greedy: no draw is paid."""
    pairs = [_IDLE if row is None else (row.sampling, row.emitted) for row in rows]
    if all(sampling.temperature == 0 for sampling, _ in pairs):
        return None
    return engine.put(make_rules(pairs))
