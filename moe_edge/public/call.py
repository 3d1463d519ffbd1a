"""A call of `Engine.generate` under way: its rows, their text, and what it took."""

import atexit
import contextlib
import time
import weakref
from collections.abc import Collection, Generator, Iterator, Sequence

import jax

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import MoeEdgeError
from moe_edge.core.interrupts import held_interrupts
from moe_edge.engine.base import Engine
from moe_edge.engine.compile_time import CompileClock
from moe_edge.engine.generate import Step, generate_steps
from moe_edge.engine.slot_rows import NewToken
from moe_edge.model.sampling import Sampling
from moe_edge.public.output import Measured
from moe_edge.serve.text_ends import StopText, TextEnds

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


class RowText:
    """The text of a row, from its first new token to its end.

    Args:
      tokenizer: None where the checkpoint has none: there is no text then.
      prompt: token ids before the first new one.
      stop: texts that end it.
      eos_ids: tokens that end it.
      max_new_tokens: how many tokens end it.
    Attributes:
      reason: "stop" or "length"; of a row that goes on the latter.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str],
        eos_ids: Collection[int],
        max_new_tokens: int,
    ):
        self._left, self._eos_ids, self._text = max_new_tokens, eos_ids, None
        if tokenizer is not None:
            stops = [StopText(text) for text in stop]
            given = {"context": [*prompt], "stop": stops, "eos_ids": eos_ids}
            self._text = TextEnds(tokenizer, **given)
        self.reason = "length"

    def add(self, token: int) -> bool:
        """One more token; whether it is the last."""
        self._left -= 1
        if self._text is None:
            is_end = token in self._eos_ids
        else:
            is_end = self._text(NewToken(None, token)) is not None
        if is_end:
            self.reason = "stop"
        elif not self._left and self._text is not None:
            self._text.finish()
            if self._text.stopped:
                self.reason = "stop"
        return is_end

    def take(self) -> str:
        """Text that became certain since the last call."""
        return "" if self._text is None else self._text.take().text


class Call:
    """A call: the engine at its K, how it draws, and where its rows stand.

    Attributes:
      measured: what it took; complete once `run` has ended.
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
        self.measured = Measured()
        self._clock = CompileClock()

    @property
    def reasons(self) -> list[str]:
        """Why each row ended."""
        return [each.reason for each in self._ends]

    def run(
        self,
        rows: Sequence[Sequence[int]],
        batches: Sequence[range],
        max_new_tokens: int,
    ) -> Iterator[tuple[int, int, str]]:
        """Yields (row, token, text that is certain by now); may be abandoned."""
        began_s = time.perf_counter()
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

    def _run_batch(self, rows, batch: range, max_new_tokens: int):
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
        measured, clock, step = self.measured, self._clock, None
        measured.batches += 1
        while True:
            self._traffic.begin(self.core, measured)
            resumed_s = time.perf_counter()
            with held_interrupts(), clock:
                last, step = step, next(steps, None)
            if step is None:
                jax.block_until_ready(last.logits_BV)  # nothing outlasts the call
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

    def __init__(self):
        self._measured: Measured | None = None  # of the call whose steps run

    def begin(self, core: Engine, measured: Measured) -> None:
        """Steps of this call are about to run."""
        if self._measured is not measured:
            self.give()
            self._core, self._before = core, _counted(core)
            self._measured = measured

    def give(self, measured: Measured | None = None) -> None:
        """No call's steps run; only if this one's do, where one is named."""
        running = self._measured
        if running is None or (measured is not None and running is not measured):
            return
        self._measured = None
        counted = zip(_counted(self._core), self._before, strict=True)
        hits, misses, moved = (max(0, now - then) for now, then in counted)
        running.add(Measured(hits=hits, misses=misses, bytes_moved=moved))
        self._core = None


def _counted(core: Engine) -> tuple[int, int, int]:
    """Hits and misses of decoding, and bytes moved, since the records were reset."""
    hits, misses = core.expert_state().lookups[True].sum(axis=0).tolist()
    return hits, misses, core.movement()["bytes_moved"]
