"""A call of `Engine.generate` under way: its rows, their text, and what it took."""

import atexit
import contextlib
import time
import weakref
from collections.abc import Generator, Iterator, Sequence

import jax

from moe_edge.core.checks import MoeEdgeError
from moe_edge.core.interrupts import held_interrupts
from moe_edge.engine.base import Engine
from moe_edge.engine.compile_time import CompileClock
from moe_edge.engine.generate import Step, even_batches, generate_steps
from moe_edge.engine.session import cache_bytes
from moe_edge.model.sampling import Sampling
from moe_edge.public.output import Measured
from moe_edge.public.row_text import RowText

_streams: weakref.WeakSet[Generator] = weakref.WeakSet()


def closed_at_exit(stream: Generator) -> Generator:
    """The stream itself; it ends with the process while there still are modules."""
    _streams.add(stream)
    return stream


@atexit.register
def _close_streams() -> None:
    for stream in [*_streams]:
        with contextlib.suppress(ValueError):  # another thread is in it
            stream.close()


class Call:
    """A call: the engine at its K, how it draws, and where its rows stand.

    Attributes:
      measured: what it took; complete once `run` has ended.
      cache_bytes: of the KV cache of its largest batch, once `run` has begun.
    """

    def __init__(
        self,
        core: Engine,
        sampling: Sampling,
        ends: Sequence[RowText],
        traffic: "Traffic",
    ):
        self.core, self._sampling, self._ends = core, sampling, ends
        self._traffic = traffic
        self.measured, self.cache_bytes = Measured(), 0
        self._clock = CompileClock()

    @property
    def reasons(self) -> list[str]:
        """Why each row ended."""
        return [each.reason for each in self._ends]

    def run(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, max_batch: int
    ) -> Generator[tuple[int, int, str]]:
        """Yields (row, token, text that is certain by now); may be abandoned.

        Args:
          max_batch: rows that run together.
        """
        began_s, batches = time.perf_counter(), even_batches(len(rows), max_batch)
        for batch in batches:
            longest = max(len(rows[i]) for i in batch) + max_new_tokens
            cache = cache_bytes(self.core.config, len(batch), longest)
            self.cache_bytes = max(self.cache_bytes, cache)
        try:
            for batch in batches:
                yield from self._run_batch(rows, batch, max_new_tokens)
        except MoeEdgeError:
            raise
        except Exception:  # of a policy, for example: the engine can go on
            self.core.recover()
            raise
        finally:
            self._traffic.give(self.measured)
            self.measured.compile_s = self._clock.between(began_s, time.perf_counter())

    def _run_batch(
        self, rows: Sequence[Sequence[int]], batch: range, max_new_tokens: int
    ) -> Iterator[tuple[int, int, str]]:
        ends = [self._ends[i] for i in batch]
        steps = generate_steps(
            self.core,
            [rows[i] for i in batch],
            max_new_tokens,
            sampling=self._sampling,
            row_ids=batch,
            on_token=lambda row, token: ends[row].add(token),
        )
        with contextlib.closing(steps):
            for step in self._timed(steps):
                for row, token in step.new:
                    yield batch[row], token, ends[row].take()

    def _timed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of a batch; what lies between two of them is the caller's time."""
        measured, clock = self.measured, self._clock
        step: Step | None = None
        measured.batches += 1
        while True:
            self._traffic.begin(self.core, measured)
            resumed_s = time.perf_counter()
            with held_interrupts(), clock:
                last, step = step, next(steps, None)
            if step is None:
                if last is not None:  # nothing outlasts the call
                    jax.block_until_ready(last.logits_BV)
                return
            start_s = step.began_s if last is None else resumed_s
            took_s = step.at_s - start_s - clock.between(start_s, step.at_s)
            if last is None:
                measured.ttft_s += took_s
            else:
                measured.decode_s += took_s
                measured.steps += 1
                measured.decoded += len(step.new)
            yield step


class Traffic:
    """Gives what an engine counts to the call that caused it: streams may take turns.

    The engine is read only where another call goes on, and at the end of one.
    """

    def __init__(self) -> None:
        self._measured: Measured | None = None  # of the call whose steps run
        self._core: Engine | None = None  # whose they are
        self._before = 0, 0, 0

    def begin(self, core: Engine, measured: Measured) -> None:
        """Steps of this call are about to run."""
        if self._measured is not measured:
            self.give()
            self._core, self._before = core, _counted(core)
            self._measured = measured

    def give(self, measured: Measured | None = None) -> None:
        """No call's steps run; only if this one's do, where one is named."""
        running, core = self._measured, self._core
        if running is None or core is None:
            return
        if measured is not None and running is not measured:
            return
        self._measured = self._core = None
        counted = zip(_counted(core), self._before, strict=True)
        hits, misses, moved = (max(0, now - then) for now, then in counted)
        running.add(Measured(hits=hits, misses=misses, bytes_moved=moved))


def _counted(core: Engine) -> tuple[int, int, int]:
    """Hits and misses of decoding, and bytes moved, since the records were reset."""
    hits, misses = core.expert_state().lookups[True].sum(axis=0).tolist()
    return hits, misses, core.movement()["bytes_moved"]
