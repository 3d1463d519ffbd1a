"""Prompts on their way into slots: a session of their own, run chunk by chunk.

Between two chunks the running batch may take a step. A row whose prompt is through
leaves at once, while longer ones go on.
"""

from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.prompt_cache import Kept, PromptCache
from moe_edge.engine.slot_programs import SlotPrograms, SlotShapes
from moe_edge.engine.slot_rows import SlotRow


class PromptRun:
    """A few prompts, prefilled together.

    Args:
      rows: as many as `shapes.prompt_rows` allows.
      cache: of prompts that ran before; rows continue after what it holds.
    """

    def __init__(
        self,
        engine: Engine,
        programs: SlotPrograms,
        shapes: SlotShapes,
        rows: Sequence[SlotRow],
        cache: PromptCache,
    ):
        self._engine, self._programs, self._shapes = engine, programs, shapes
        self._cache = cache
        self.rows: list[SlotRow | None] = list(rows)
        R = shapes.prompt_rows_for(len(rows))
        longest = max(len(row.prompt) for row in rows)
        self._capacity = shapes.prompt_capacity_for(longest)
        session = self.session = shapes.new_session(engine, R, self._capacity)
        for place, row in enumerate(rows):
            row.sequence, row.prompt_k = session.sequences[place], row.k
            kept = None
            if not row.score_prompt:
                kept, row.cached = cache.find(row.prompt, row.k)
            row.length = row.cached
            if cache.whole:
                row.kept_ends = cache.ends(row.prompt, row.k)
            if kept is not None:
                pairs = zip(session.caches, kept.caches, strict=True)
                moves = [(place, 0, row.cached)]
                session.caches = [
                    programs.copy_rows(layer, *pair, moves, shapes.part)
                    for layer, pair in enumerate(pairs)
                ]
        self.rows += [None] * (R - len(rows))
        session.k_B = engine.put(
            np.array([1 if row is None else row.k for row in self.rows], np.int32)
        )
        session.lengths = [0 if row is None else row.length for row in self.rows]
        engine.begin_prompts(session, [row.prompt for row in rows])

    @property
    def is_done(self) -> bool:
        """Whether nobody waits for another chunk."""
        return not any(self._waits(row) for row in self.rows)

    @staticmethod
    def _waits(row: SlotRow | None) -> bool:
        return row is not None and not row.released and row.length < len(row.prompt)

    def chunk(self, on_routing=None) -> tuple[list[SlotRow | None], jax.Array | None]:
        """Runs the next chunk of every prompt.

        Args:
          on_routing: as in `Engine.chunks`.
        Returns:
          (by place the rows whose prompts are through now, logits `[R, V]` after their
          last tokens, or None if there are none).
        """
        engine, session, C = self._engine, self.session, self._shapes.chunk
        parts = [
            row.prompt[row.length : row.length + C] if self._waits(row) else ()
            for row in self.rows
        ]
        sizes = [len(part) for part in parts]
        padded = self._shapes.padded(max(sizes), self._capacity)
        tokens = np.zeros((len(parts), padded), np.int32)
        start_B = np.zeros(len(parts), np.int32)
        for place, part in enumerate(parts):
            tokens[place, : len(part)] = part
            if part:
                start_B[place] = self.rows[place].length
        valid = np.arange(padded)[None] < np.array(sizes)[:, None]
        session.grow(sizes)
        x_BSD = engine.run_chunk(session, tokens, valid, start_B, on_routing)
        for place, row in enumerate(self.rows):
            if sizes[place] and row.score_prompt:
                self._score(row, x_BSD, place, sizes[place])
        through: list[SlotRow | None] = [None] * len(parts)
        for place, (row, size) in enumerate(zip(self.rows, sizes, strict=True)):
            if size:
                row.length += size
                if row.length in row.kept_ends and not row.released:
                    self._keep(row, place)
                if not self._waits(row):
                    through[place] = row
        if not any(through):
            return through, None
        at_B = engine.put(np.array(sizes, np.int32) - 1)
        top = engine.programs.top
        return through, top.last_head(engine.weights.top, x_BSD, at_B)

    def _keep(self, row: SlotRow, place: int) -> None:
        """Copies a row's caches, which end with a chunk, if they are news."""
        tokens, k = row.prompt[: row.length], row.prompt_k
        num_bytes = self._shapes.kept_bytes(len(tokens))
        if not self._cache.wants(tokens, k, num_bytes):
            return
        self._cache.make_room(tokens, k, num_bytes)
        where = self._engine, self._shapes, self.session, place, len(tokens)
        caches = self._programs.copy_out(*where)
        self._cache.add(k, Kept(tokens, caches, num_bytes))

    def _score(self, row: SlotRow, x_BSD, place: int, size: int) -> None:
        """How likely the tokens are that follow those of a row's chunk."""
        following = row.prompt[row.length + 1 : row.length + 1 + size]
        next_S = np.zeros(x_BSD.shape[1], np.int32)
        next_S[: len(following)] = following
        row_next = self._engine.put((np.int32(place), next_S))
        found = self._programs.prompt_log_probs(
            self._engine.weights.top, x_BSD, *row_next
        )
        found = [each[: len(following)] for each in jax.device_get(found)]
        row.prompt_scores += row.scores(found)
