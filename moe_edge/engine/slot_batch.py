"""The session of a running batch: rows in places, of few sizes of batch and capacity.

It grows as rows join and lengthen, and shrinks when the rows left need less, by
copying their caches into another session: a step's time follows rows and capacity.

Where nothing is known to change, the next step begins before this one's tokens are
read: the device computes while Python tells them to whoever asked. Who joined or left
meanwhile takes no harm: a row has the same values in any company (the same bits where
all steps have one shape). A row that left is ignored, and a step begun at another K, or
before a row joined, is run again: so no step begins early where layers keep states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.session import Session
from moe_edge.engine.slot_programs import SlotPrograms, SlotShapes
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slot_tokens import next_tokens, rules_of
from moe_edge.model.new_token import NewToken


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
        self, rows: Sequence[SlotRow], session: Session, places: Sequence[int]
    ) -> None:
        """Copies rows out of the prompts' session into free places.

        Args:
          places: of the rows in that session.
        """
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

        new, self._tokens_B, self._rules = next_tokens(
            self._programs,
            self._engine,
            begun.logits_BV,
            rows,
            self._rules,
            begin_next,
        )
        for row in rows:
            if row is not None:
                row.length += 1
                self.changed |= not row.is_active
        return new

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

    def _is_steady(self, rows: Sequence[SlotRow | None]) -> bool:
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

    def _tell(self, rows: Sequence[SlotRow | None]) -> None:
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
        self._rules = rules_of(rows, self._engine)
        self.changed = False
