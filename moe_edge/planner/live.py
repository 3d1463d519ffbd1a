"""Timed runs of a checkpoint's engines, which share weights, store and programs."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.heap import keep_heap
from moe_edge.engine.device_memory import device_memory_bytes
from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble, check_offload
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.model.sampling import Sampling
from moe_edge.model.sub_experts import at_k
from moe_edge.offload.store import HostStore
from moe_edge.planner.described import Described
from moe_edge.simulate.replay.recorded import RunLog
from moe_edge.workload.traces import Trace

MOST_DISTURBED = 3
WARM_BATCHES = 2


class StampedLog(RunLog):
    """Also keeps when each layer's routing was read."""

    def __init__(self, *shape: int, rows: int):
        super().__init__(*shape, rows=rows)
        self.stamps_s: list[float] = []

    def lookup(self, layer, routing):
        super().lookup(layer, routing)
        if self._keeps:
            self.stamps_s.append(time.perf_counter())

    def layer_s(self) -> float:
        """Seconds from a layer's routing to the next one's: the median in a step."""
        layers = np.array([layer for layer, *_ in self.lookups])
        between = np.diff(np.array(self.stamps_s))[np.diff(layers) > 0]
        return float(np.median(between)) if len(between) else 0.0

    def step_s(self, batches: int) -> np.ndarray:
        """float64 [batches, steps - 1]: from a step's first routing to the next's."""
        first = self.lookups[0][0]
        stamps = np.array(
            [s for s, (layer, *_) in zip(self.stamps_s, self.lookups, strict=True)
             if layer == first]
        )  # fmt: skip
        return np.diff(stamps.reshape(batches, -1), axis=1)


@dataclasses.dataclass(frozen=True)
class Run:
    """What the batches of a run took.

    Attributes:
      step_s: float64 [batches, steps - 1], seconds of the decode steps but the last.
      ttft_s: float64 [batches], until the first token.
      steps: decode steps of a batch.
      log: its lookups and predictions.
      hit_ratio: of decoding.
      load_s: mean seconds that a block's transfer took; nan: there was none.
      misses: blocks a step that were absent; wait_s: that it stood still for them.
      device_bytes: weights and slots.
      trace: of an engine that keeps one.
    """

    step_s: np.ndarray
    ttft_s: np.ndarray
    steps: int
    log: StampedLog
    hit_ratio: float
    load_s: float
    misses: float
    wait_s: float
    device_bytes: int
    trace: Trace | None = None

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a step."""
        return float(undisturbed(self.step_s).mean())


def undisturbed(step_s: np.ndarray) -> np.ndarray:
    """Seconds of steps; one that is far off counts as MOST_DISTURBED medians."""
    return np.minimum(step_s, MOST_DISTURBED * np.median(step_s))


class Live(Described):
    """A checkpoint at one K, with its weights.

    Args:
      checkpoint: path or name.
      k: experts a token; None: its own.
      batch, context: rows that decode together and their tokens, for whose KV cache a
        size leaves room.
      kv_cache: how keys and values are kept.
      memory: where experts without a slot live, as of `HostStore`.
    """

    def __init__(
        self,
        checkpoint: str,
        k: int | None,
        batch: int,
        context: int,
        kv_cache: str = "float32",
        memory: str = "host",
    ):
        keep_heap()
        self.reader = reader = open_checkpoint(checkpoint)
        reader.config = at_k(reader.config, k).with_cache(kv_cache)
        here = device_memory_bytes(), jax.default_backend()
        room = batch, context
        super().__init__(reader.config, reader.dtype, *room, *here, reader=reader)
        self._weights = load_weights(self.reader, with_experts=False)
        self._store = HostStore(self.reader, memory)
        self._programs = None

    def mapped(self) -> ResidentEngine:
        """An engine of all experts, which stay in the files of the checkpoint."""
        given = {"dense": self._weights, "mapped": True}
        return ResidentEngine(load_weights(self.reader, **given))

    @contextlib.contextmanager
    def engine(
        self, options: OffloadOptions, with_trace: bool = False
    ) -> Iterator[LayeredEngine]:
        """An engine of mode layered; it ends with the block."""
        options = dataclasses.replace(options, mode="layered")
        room = self.batch, self._context
        context = check_offload(self.reader, options, *room, with_trace)
        engine = assemble(
            options,
            self._weights,
            self._store,
            context=context,
            batch=self.batch,
            capacity=self._context,
            with_trace=with_trace,
            programs=self._programs,
        )
        self._programs = engine.programs
        with engine:
            yield engine

    def run(
        self,
        engine: LayeredEngine,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        sampling: Sampling,
        rounds: int = 1,
        fills: bool = False,
    ) -> Run:
        """Continues prompts, a batch after the other; end-of-text tokens end nothing.

        What a row draws depends on its number alone: all engines of a lossless route
        write the same.

        Args:
          prompts: of one length, a multiple of the batch.
          rounds: how often all are run, each time from empty slots: a step takes the
            median of what it took.
          fills: run them once more at first, and keep what is in slots.
        """
        warm_up(engine, prompts[: self.batch], new_tokens, sampling)
        first = [*prompts[: WARM_BATCHES * self.batch]]
        for at in range(0, len(first), self.batch):  # a first run takes longer
            generate(engine, first[at : at + self.batch], new_tokens, sampling=sampling)
        engine.restart()
        spec, horizon = engine.cache.spec, engine.predictor_run.horizon
        took_s, ttft_s = [], []
        for _ in range(rounds + fills):
            if not fills:
                engine.restart()
            engine.reset_records()
            log = StampedLog(
                spec.num_layers, spec.num_experts, horizon, rows=self.batch
            )
            engine.predictor_run.accuracy = log
            done = []
            for first in range(0, len(prompts), self.batch):
                rows = range(first, min(first + self.batch, len(prompts)))
                given = [prompts[i] for i in rows]
                found = generate(
                    engine,
                    given,
                    new_tokens,
                    sampling=sampling,
                    row_ids=rows,
                    on_routing=log.lookup,
                )
                done.append(found)
            took_s.append(log.step_s(len(done)))
            ttft_s.append([one.ttft_s for one in done])
        steps, sent = done[0].steps, engine.queue.stats()
        counted = engine.layer_step.counters[True]
        moved = sent.demand.count + sent.prefetch.count
        moved_s = sent.demand.seconds + sent.prefetch.seconds
        total = steps * len(done)
        return Run(
            step_s=np.median(took_s[fills:], axis=0),
            ttft_s=np.median(ttft_s[fills:], axis=0),
            steps=steps,
            log=log,
            hit_ratio=float(counted.hit_ratio or 0.0),
            load_s=moved_s / moved if moved else float("nan"),
            misses=counted.misses / total,
            wait_s=counted.wait_s / total,
            device_bytes=engine.device_bytes(),
            trace=None if engine.trace is None else engine.trace.trace(),
        )
