"""Row slots: a running batch whose rows join and leave between steps.

The batch is a session of few rows and one capacity, both of few sizes; each row has a
place in it. Caches stay contiguous: with few rows, pages would make XLA gather them at
every step. Position, K, sampling rule, random key and step of a row are data, so no
row compiles anything. K: the model's own top-k is chosen, ranks beyond a row's K get id
E, which no kernel computes. Prompts run in a session of their own (`prompt_run`), at
most one chunk between two steps, and are then copied into their places; when rows
leave, the batch moves into a smaller session. Works over every engine.

    slots = RowSlots(engine, max_rows=8, max_context=1024)
    slots.warm_up()                          # from here on nothing compiles
    slots.admit([SlotRow(id="a", prompt=(1, 2, 3), max_new_tokens=20, k=16)])
    while slots.is_busy:
        for new in slots.step():             # NewToken(id, token, score)
            if new.token in stop_ids:
                slots.release(new.id)

A row that has its `max_new_tokens` takes no further step; every row is released by the
caller, at whatever point: its place is free from then on. One thread at a time.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.base import Engine
from moe_edge.engine.prompt_cache import Kept, PromptCache
from moe_edge.engine.prompt_run import PromptRun
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.sizes import capacity_for
from moe_edge.engine.slot_batch import SlotBatch
from moe_edge.engine.slot_programs import SlotPrograms, SlotShapes
from moe_edge.engine.slot_rows import SlotRow, check_k
from moe_edge.engine.slot_warm_up import warm_up
from moe_edge.model.new_token import NewToken
from moe_edge.model.router import Routing


class RowSlots:
    """A running batch over an engine.

    Args:
      engine: of any mode; nobody else uses it meanwhile.
      max_rows, max_context, prefill_chunk, prompt_rows, deterministic: see
        `SlotShapes`. Deterministic: the bits of a row's log probabilities do not
        depend on other rows or on the prompt cache.
      prompt_cache_bytes: for the caches of rows that ended, with states of prompts as
        they run (`prompt_cache.py`); 0 keeps none.
    Raises:
      ConfigError: an engine that keeps a record of one sequence, or with deterministic
        one where company matters (`check_rows`).
      CapacityError: more than the model's context, more bytes of caches than the
        engine's budget left for them (`kv_limit_bytes`), or a prompt cache that could
        not keep one state.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int = 8,
        max_context: int,
        prefill_chunk: int = 512,
        prompt_rows: int = 8,
        deterministic: bool = False,
        prompt_cache_bytes: int = 0,
    ):
        engine.check_rows(deterministic)
        self.engine = engine
        self.shapes = SlotShapes(
            engine.config,
            max_rows=max_rows,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            prompt_rows=min(prompt_rows, max_rows),
            deterministic=deterministic,
        )
        self.shapes.check_budget(engine.kv_limit_bytes, prompt_cache_bytes)
        given = self.shapes.chunk, engine.config.has_states
        self.cache = PromptCache(prompt_cache_bytes, *given)
        self._programs = SlotPrograms.of(engine)
        self._rows: dict[Hashable, SlotRow] = {}
        self._waiting: list[SlotRow] = []
        self._run: PromptRun | None = None
        self._batch = SlotBatch(engine, self._programs, self.shapes)
        # Told every routing of the next steps, as in `Engine.chunks`; None: nobody.
        self.on_routing: Callable[[int, Routing], None] | None = None

    def warm_up(self, engine: Engine | None = None) -> float:
        """Compiles all that rows may need; returns its seconds.

        The engine counts from here on (`Engine.reset_records`).

        Args:
          engine: runs the steps in place of its own: one of the same programs.
        """
        seconds = warm_up(
            engine or self.engine, self._programs, self.shapes, self.cache
        )
        self.engine.recover()  # what `clear` needs is compiled too
        self.engine.reset_records()
        return seconds

    # Who runs.

    @property
    def is_busy(self) -> bool:
        """Whether a step would compute anything."""
        return self.has_prompts or any(row.is_active for row in self._batch.rows)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits or is on its way."""
        return bool(self._waiting) or self._run is not None

    @property
    def num_rows(self) -> int:
        """Rows that are admitted and not released."""
        return len(self._rows)

    @property
    def ids(self) -> list[Hashable]:
        """Of the rows that are not released, in the order of admission."""
        return list(self._rows)

    def __getitem__(self, id: Hashable) -> SlotRow:
        """What is known of a row that is not released."""
        return self._rows[id]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the caches of the running rows and of the prompts on their way."""
        sessions = [self._batch.session, self._run and self._run.session]
        arrays = jax.tree.leaves([each.caches for each in sessions if each])
        return sum(array.nbytes for array in arrays)

    def row_bytes(self, need: int) -> int:
        """Bytes of the cache of a row of so many positions (`SlotRow.need`)."""
        return self.shapes.row_bytes(need)

    def together_bytes(self, rows_bytes: Iterable[int]) -> int:
        """Bytes of a session of rows, from `row_bytes` of each: what a loop budgets.

        While the batch moves there are more (`SlotShapes.peak_bytes`).
        """
        return self.shapes.together_bytes(rows_bytes)

    def cached_tokens(self, prompt: Sequence[int], k: int | None = None) -> int:
        """Tokens of a prompt that the prompt cache would spare now.

        `self[id].cached` says what it did spare, once the row's prompt has begun.
        """
        k = self.engine.config.moe.top_k if k is None else k
        return self.cache.count(prompt, k)

    def num_compiled(self) -> int:
        """Programs compiled so far, the engine's among them."""
        return self.engine.num_compiled() + self._programs.num_compiled()

    def admit(self, rows: Sequence[SlotRow]) -> None:
        """Rows join: their prompts run in the next steps, in this order.

        Raises:
          RequestError: an id that runs already, an empty prompt or unknown token, a K
            outside 1..own K, or too many log probabilities.
          CapacityError: a row longer than max_context, or more rows than max_rows.
        """
        free = self.shapes.max_rows - self.num_rows
        if len(rows) > free:
            raise CapacityError(
                f"{len(rows)} rows for {free} free of {self.shapes.max_rows} slots; "
                "release rows first"
            )
        mine = [self.check(row) for row in rows]
        ids = {row.id for row in rows}
        if len(ids) < len(rows) or ids & self._rows.keys():
            raise RequestError("two rows have one id; give each its own")
        self._waiting += mine
        self._rows |= {row.id: row for row in mine}

    def check(self, row: SlotRow) -> SlotRow:
        """What a row would be if it was admitted; raises what `admit` would."""
        config, most = self.engine.config, self.shapes.max_context
        return row.checked(config.vocab_size, config.moe.top_k, most)

    def set_k(self, id: Hashable, k: int) -> None:
        """A row goes on at another K.

        Raises: as `admit`.
        """
        row = self._rows[id]
        if check_k(id, k, self.engine.config.moe.top_k) != row.k:
            if row.same_k is None and row.prompt_k is not None:
                row.same_k = row.length
            row.k, self._batch.changed = k, True

    def release(self, id: Hashable) -> None:
        """A row leaves, at once; what it computed goes to the prompt cache."""
        row = self._rows.pop(id)
        row.released = True
        self._waiting = [each for each in self._waiting if each is not row]
        if self._run is not None and self._run.is_done:
            self._run = None
        if row.place is None:
            return
        if not self.cache.whole:  # a state stands at the row's end, not at a chunk's
            self._keep(row)
        self._batch.remove(row)

    def clear(self) -> None:
        """All rows leave: after a step that raised, when any cache may be lost."""
        for row in self._rows.values():
            row.released = True
        self._rows, self._waiting, self._run = {}, [], None
        self._batch = SlotBatch(self.engine, self._programs, self.shapes)
        self.cache.clear()
        self.engine.recover()

    def _keep(self, row: SlotRow) -> None:
        """Copies the first whole chunks of a row's cache, if they are news."""
        C = self.shapes.chunk
        length = row.length if row.same_k is None else row.same_k
        # A decoded token's bits are not a prompt's; under a lossy route, which acts in
        # decoding, neither are its values.
        if self.shapes.deterministic or not self.engine.lossless:
            length = min(length, len(row.prompt))
        tokens = tuple(row.tokens[: length // C * C])
        num_bytes = self.shapes.kept_bytes(len(tokens))
        if not self.cache.wants(tokens, row.prompt_k, num_bytes):
            return
        self.cache.make_room(tokens, row.prompt_k, num_bytes)
        where = self.engine, self.shapes, self._batch.session, row.place, len(tokens)
        caches = self._programs.copy_out(*where)
        self.cache.add(row.prompt_k, Kept(tokens, caches, num_bytes))

    def keep(self, k: int, tokens: tuple[int, ...], layers: Mapping[int, Any]) -> bool:
        """Puts caches of an earlier run into the prompt cache; whether they fit.

        Args:
          tokens: whole chunks; layers: by number, arrays by name as `_keep` makes them.
        """
        C, config = self.shapes.chunk, self.engine.config
        if not 1 <= k <= config.moe.top_k or len(tokens) > self.shapes.max_context:
            return False
        if not tokens or len(tokens) % C:
            return False
        capacity = capacity_for(self.shapes.kept_capacity(len(tokens)))
        num_bytes = cache_bytes(config, 1, capacity)
        for layer in range(config.num_layers):
            wanted = self.engine.cache_arrays(layer, 1, capacity)
            arrays = layers.get(layer, {})
            given = {name: (a.shape, a.dtype) for name, a in arrays.items()}
            if given != {name: (a.shape, a.dtype) for name, a in wanted.items()}:
                return False
        if not self.cache.wants(tokens, k, num_bytes):
            return False
        self.cache.make_room(tokens, k, num_bytes)
        caches = [self.engine.put_cache(layers[n]) for n in range(config.num_layers)]
        self.cache.add(k, Kept(tokens, caches, num_bytes))
        return True

    # Steps.

    def step(self) -> list[NewToken]:
        """A token of every running row, then at most one chunk of prompts.

        A row decodes from the step after its prompt's last chunk, which gives its first
        token (as in `simulate/serving.py`).
        """
        return self.decode() + self.prefill()

    def prefill(self) -> list[NewToken]:
        """Runs a chunk of waiting prompts; first tokens of those that are through."""
        if self._run is None:
            if not self._waiting:
                return []
            lengths = [len(row.prompt) for row in self._waiting]
            most = self.shapes.prompts_together(lengths)
            rows, self._waiting = self._waiting[:most], self._waiting[most:]
            where = self.engine, self._programs, self.shapes
            self._run = PromptRun(*where, rows, self.cache)
        run = self._run
        through, logits_BV = run.chunk(self.on_routing)
        if run.is_done:
            self._run = None
        if logits_BV is None:
            return []
        return self._batch.insert(through, logits_BV, run.session)

    def decode(self) -> list[NewToken]:
        """A token of every running row."""
        return self._batch.decode(not self.has_prompts, self.on_routing)
