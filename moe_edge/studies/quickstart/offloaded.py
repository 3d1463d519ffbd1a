"""The quickstart's offloaded part: the same text from a quarter of the experts."""

import dataclasses
from pathlib import Path

from moe_edge.core.events import Event, Recorder
from moe_edge.engine.batches import generate_rows
from moe_edge.engine.load import Loaded, load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.prompts import encode_prompts
from moe_edge.metrics.plots import timeline
from moe_edge.metrics.results import metric
from moe_edge.model.sampling import Sampling
from moe_edge.studies.quickstart.texts import story_prompt

BUDGET = "25%"
TRANSFER_LATENCY_S = 50e-6
LOAD_OF_LAYER = 0.5  # an expert's transfer, in layers of resident compute


@dataclasses.dataclass(frozen=True)
class OffloadedRun:
    """A greedy text written with experts on the host.

    Attributes:
      is_same: whether every token is the resident engine's.
      tokens_per_s: of the offloaded engine, on the emulated link.
      hit_ratio: experts that were on the device when a layer chose them.
      bytes_moved: over the link.
      link_bytes_per_s: its rate.
      events: of the run.
    """

    is_same: bool
    tokens_per_s: float
    hit_ratio: float
    bytes_moved: int
    link_bytes_per_s: float
    events: list[Event]

    @property
    def sentence(self) -> str:
        same = "the same text" if self.is_same else "ANOTHER TEXT"
        return (
            f"with {BUDGET} of the experts on the device {same}, "
            f"{100 * self.hit_ratio:.0f} % of the chosen experts were there"
        )

    def metrics(self) -> list[dict]:
        """Rows of the results entry."""
        policy = f"offloaded, {BUDGET}, lru, stale_gate"
        return [
            metric(policy, "decode speed, batch 1", self.tokens_per_s, "tokens/s"),
            metric(policy, "hit ratio", self.hit_ratio, "1"),
            metric(policy, "bytes moved", self.bytes_moved, "bytes"),
            metric(policy, "emulated link", self.link_bytes_per_s, "bytes/s"),
        ]

    def plot(self, path: Path) -> None:
        rate = f"{self.link_bytes_per_s / 1e6:.0f} MB/s"
        title = f"Experts travel while layers compute (emulated link, {rate})"
        timeline(path, self.events, title=title)


def show_offloaded(loaded: Loaded, max_new_tokens: int) -> OffloadedRun:
    """Writes a text twice, resident and offloaded, and compares.

    The link is emulated: on a machine without an accelerator host and device are the
    same memory, and a transfer would take no time.
    """
    limit = loaded.engine.config.max_positions
    rows = encode_prompts(loaded.tokenizer, [story_prompt()], max_new_tokens, limit)
    greedy = Sampling()
    expected, speed = generate_rows(loaded.engine, rows, max_new_tokens, greedy)
    config = loaded.engine.config
    layer_s = 1 / max(speed["tokens_per_s"], 1e-9) / config.num_layers
    records = next(e for e in loaded.engine.weights.experts if e is not None)
    block_bytes = records.nbytes / config.moe.num_experts
    rate = block_bytes / (LOAD_OF_LAYER * layer_s)
    options = OffloadOptions(
        device_memory=BUDGET,
        predictor="stale_gate",
        link_bytes_per_s=rate,
        link_latency_s=TRANSFER_LATENCY_S,
    )
    recorder = Recorder()
    offloaded = load_engine(loaded.name, offload=options, recorder=recorder).engine
    with offloaded:
        tokens, speed = generate_rows(offloaded, rows, max_new_tokens, greedy)
        moved = offloaded.movement()
    run = OffloadedRun(
        is_same=tokens == expected,
        tokens_per_s=speed["tokens_per_s"],
        hit_ratio=moved["hit_ratio"] or 0.0,
        bytes_moved=moved["bytes_moved"],
        link_bytes_per_s=rate,
        events=recorder.events(),
    )
    print(
        f"Offloaded: {run.sentence}; {run.bytes_moved / 1e6:.1f} MB moved over an "
        f"emulated link of {rate / 1e6:.0f} MB/s, {run.tokens_per_s:.0f} tokens/s."
    )
    return run
