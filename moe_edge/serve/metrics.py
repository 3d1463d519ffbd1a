"""What `/metrics` tells, in Prometheus' text format; numbers only, never a text.

Steps and requests are counted as they end, steps by the engine's thread and in few
microseconds. What the engine counts itself (experts, bytes) and what only stands there
(queues, caches) is read when somebody asks.

    metrics = Metrics()                       # an observer of the engine thread
    figures = take_figures(driver)            # on that thread, between two steps
    body = metrics.text(figures)
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from moe_edge.schedule.policy import OUTCOMES
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.observers import Observer

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PREFIX = "moe_edge_"

# Seconds: from a quick step, or token, to the longest request.
_STEPS = (1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_PICKS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_KS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)

_KINDS = ("decode", "prefill")
_HISTOGRAMS = {
    "queue_seconds": ("From arrival to the first step.", _WAITS),
    "ttft_seconds": ("From arrival to the first token.", _WAITS),
    "tpot_seconds": ("Of each token after the first, of finished requests.", _STEPS),
    "e2e_seconds": ("From arrival to the last token, of finished requests.", _WAITS),
    "step_seconds": ("A half of a step.", _STEPS),
    "pick_seconds": ("The policy's choice of a step's rows and K.", _PICKS),
    "batch_rows": ("Requests in a step.", _ROWS),
    "row_k": ("Experts a token, of each row of a step.", _KS),
}


_GAUGES = {
    "requests_running": "Requests that run.",
    "requests_waiting": "Requests in the queue.",
    "kv_bytes": "Caches reserved by what runs.",
    "kv_budget_bytes": "The most of them.",
    "prompt_cache_bytes": "Kept caches.",
    "compiled_programs": "Programs compiled.",
}


class Figures(NamedTuple):
    """What stands there at one moment, and what the engine counts itself.

    Attributes:
      gauges: of `_GAUGES`, in order.
      lookups: (phase, result) -> distinct experts; bytes: cause -> that were brought.
    """

    gauges: tuple[float, ...]
    lookups: dict[tuple[str, str], int]
    bytes: dict[str, int]


def take_figures(driver: Driver) -> Figures:
    """As of now; waits for the device."""
    slots, lane = driver.slots, driver.loop.lanes[0]
    state = slots.engine.expert_state()
    gauges = driver.num_running, driver.num_waiting, lane.kv_bytes(), lane.budget_bytes
    lookups = {}
    for phase, is_decode in (("decode", True), ("prefill", False)):
        hits, misses = state.lookups[is_decode].sum(axis=0).tolist()
        lookups |= {(phase, "hit"): hits, (phase, "miss"): misses}
    return Figures(
        (*gauges, slots.cache.num_bytes, slots.num_compiled()),
        lookups,
        {"demand": state.demand_bytes, "prefetch": state.prefetch_bytes},
    )


class Tally:
    """A histogram that one thread fills, a microsecond a value, and any may read."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._inside, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._inside[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self) -> tuple[list[tuple[str, int]], float]:
        """(bound -> how many values up to it, their sum)."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = itertools.accumulate(self._inside)
        return list(zip(names, counts, strict=True)), self._sum


class Metrics(Collector, Observer):
    """All metrics of a server, in a registry of its own."""

    def __init__(self):
        prometheus.disable_created_metrics()  # a second series for every counter
        self._registry = prometheus.CollectorRegistry()
        self._figures: Figures | None = None
        self._requests = self._counter(
            "requests", "Requests that ended, by how.", ("endpoint", "outcome")
        )
        for labels in itertools.product(ENDPOINTS, OUTCOMES):
            self._requests.labels(*labels)  # shown from the start, as 0
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that ran.")
        self._cached = self._counter(
            "cached_prompt_tokens", "Of these, spared by the prompt cache."
        )
        self._generated = self._counter("generated_tokens", "New tokens.")
        # (name, `kind`) -> tally.
        self._tallies = {
            (name, kind): Tally(bounds)
            for name, (_, bounds) in _HISTOGRAMS.items()
            for kind in (_KINDS if name == "step_seconds" else (None,))
        }
        self._registry.register(self)

    def _counter(self, name, text, labels=()) -> prometheus.Counter:
        return prometheus.Counter(PREFIX + name, text, labels, registry=self._registry)

    def _observe(self, name: str, value: float, kind: str | None = None) -> None:
        self._tallies[name, kind].observe(value)

    # Events.

    def stepped(self, driver: Driver, stepped: Stepped) -> None:
        """On the engine thread, after a step that computed something, or tried to."""
        self._observe("batch_rows", len(stepped.k))
        for k in stepped.k:
            self._observe("row_k", k)
        if stepped.error is not None:
            return
        self._observe("pick_seconds", stepped.pick_s)
        self._generated.inc(len(stepped.tokens))
        first = [row for row, *_ in stepped.tokens if row.made == 1]
        decoded = len(stepped.tokens) - len(first)
        if decoded:
            self._observe("step_seconds", stepped.decode_s, "decode")
        if decoded < len(stepped.k):  # the others have prompts on their way
            self._observe("step_seconds", stepped.prefill_s, "prefill")
        for row in first:
            self._begin(row)

    def _begin(self, row: Request) -> None:
        """A request has its first token."""
        self._prompt.inc(row.prompt_tokens)
        self._cached.inc(row.cached_tokens)
        self._observe("queue_seconds", row.queue_s)
        self._observe("ttft_seconds", row.ttft_s)

    def ended(self, endpoint: str, row: Request) -> None:
        """A request that the driver knows is over, in whatever way."""
        self._requests.labels(endpoint, row.state).inc()
        if row.state == "finished" and row.made:
            self._observe("e2e_seconds", row.e2e_s)
            if row.tpot_s is not None:
                self._observe("tpot_seconds", row.tpot_s)

    def refused(self, endpoint: str, count: int) -> None:
        """Requests that the driver was not even asked for."""
        self._requests.labels(endpoint, "refused").inc(count)

    # Reading.

    def text(self, figures: Figures | None = None) -> bytes:
        """The body of an answer of type CONTENT_TYPE.

        Args:
          figures: None where the engine does not answer: those of last time.
        """
        self._figures = figures or self._figures
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[prometheus.Metric]:
        """What is read when somebody asks; called by the registry."""
        for name, (text, _) in _HISTOGRAMS.items():
            labels = ("kind",) if name == "step_seconds" else ()
            family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            for (of, kind), tally in self._tallies.items():
                if of == name:
                    family.add_metric((kind,) if labels else (), *tally.sample())
            yield family
        if (now := self._figures) is None:
            return
        for (name, text), value in zip(_GAUGES.items(), now.gauges, strict=True):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        lookups = CounterMetricFamily(
            PREFIX + "expert_lookups",
            "Distinct experts of a layer and step.",
            labels=("phase", "result"),
        )
        for labels, count in now.lookups.items():
            lookups.add_metric(labels, count)
        yield lookups
        brought = CounterMetricFamily(
            PREFIX + "expert_bytes", "Brought to the device.", labels=("cause",)
        )
        for cause, num_bytes in now.bytes.items():
            brought.add_metric([cause], num_bytes)
        yield brought
