"""How long OD-MoE takes for a prompt, from the times of its parts; pure.

OD-MoE, section 3.3: every worker has loaded its expert of a layer; the main node sends
each the hidden states of the expert's tokens, in mini-batches in turn, and workers
compute what has arrived while the next is on its way (figure 7). An expert's rows are
in as many products as there are mini-batches, so live clusters of ours, whose bits do
not depend on who computes, send them whole: that is one mini-batch.
"""

import dataclasses
import math

from moe_edge.core.checks import check_count, check_from_zero


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Times of a prompt's parts, in seconds.

    Attributes:
      layers: MoE layers.
      rows: hidden states of a layer that go to experts: tokens times chosen experts,
        alike for all workers.
      main_s: the main node's part of a layer.
      load_s: a worker's expert of a layer, which it loads once it has computed the
        layer before.
      row_s: a hidden state on the main node's line, which carries one at a time, both
        ways at once.
      expert_s: a product however few its rows (the weights are read).
      expert_row_s: of each row, where that is longer.
      workers: that share a layer's experts.
      mini_batches: of a layer's rows.
      latency_s: of a message, one way.
    """

    layers: int
    rows: int
    main_s: float
    load_s: float
    row_s: float
    expert_s: float
    expert_row_s: float
    workers: int = 8
    mini_batches: int = 1
    latency_s: float = 0.0

    def __post_init__(self):
        """Raises ConfigError for what cannot be."""
        for name in ("layers", "rows", "workers", "mini_batches"):
            check_count(name, getattr(self, name))
        times = ("main_s", "load_s", "row_s", "expert_s", "expert_row_s", "latency_s")
        for name in times:
            check_from_zero(name, getattr(self, name))

    def parts(self) -> list[int]:
        """Rows of a worker in each mini-batch: as even as can be, none empty."""
        own = math.ceil(self.rows / self.workers)
        count = min(self.mini_batches, own)
        return [own // count + (number < own % count) for number in range(count)]

    def ttft_s(self) -> float:
        """Seconds until the last layer's rows are back."""
        now_s = 0.0
        ready_s = [self.load_s] * self.workers  # when each has its expert
        for _ in range(self.layers):
            now_s, done_s = self._layer(now_s + self.main_s, ready_s)
            ready_s = [done + self.load_s for done in done_s]
        return now_s

    def _layer(self, now_s: float, ready_s: list[float]) -> tuple[float, list[float]]:
        """When a layer's rows are back, and when each worker has computed its own."""
        sent_s, free_s, computed = now_s, list(ready_s), []
        for part in self.parts():
            for worker in range(self.workers):
                sent_s += part * self.row_s
                begin_s = max(free_s[worker], sent_s + self.latency_s)
                compute_s = max(self.expert_s, part * self.expert_row_s)
                free_s[worker] = begin_s + compute_s
                computed.append((free_s[worker], part))
        back_s = now_s
        for at_s, part in sorted(computed):  # the line takes them as they come
            back_s = max(back_s, at_s) + part * self.row_s
        return back_s + self.latency_s, free_s
