"""What the studies of offloading take and give, until each has settings of its own."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_count, check_known, check_positive
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.results import Entry, write_entry

LIMITS = (
    "One tiny model, trained here on two CPU cores, with 64 experts of 74 kB a layer: "
    "its routing is less skewed and its layers are far shorter than a real model's.",
    "The link is emulated: a transfer lasts as long as the stated rate and latency "
    "say, in real time. Device and host are the same two cores, which transfers' "
    "bookkeeping, host-computed experts and the model itself share.",
    "A few short continuations of real prompts: spreads are over rounds with prompts "
    "of their own, not confidence intervals.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The size of a study; not every study reads everything.

    Attributes:
      checkpoint: path or `default`.
      data_dir: where `sources` and `traces` are looked up; without it prompts come
        from the packaged held-out text.
      sources: prompt files (`.jsonl` with `prompt`, or plain text), used in turn.
      budgets: device memory of each case.
      batches: sequences that decode together.
      rounds: measured repetitions, cases interleaved.
      prompt_tokens, new_tokens: of each sequence.
      history: sequences shown beforehand to what learns from past ones.
      a: SMoE's margin, for routing and for what is prefetched.
      link_factor: time of an expert's bytes on the link, in layers of resident
        compute; `link_latency_s` comes on top.
      fidelity_rows: real texts of `new_tokens` teacher-forced tokens each, for cases
        that are not lossless.
      horizon: most layers that predictors look ahead.
      lengths: prompt lengths for the time to first token.
      traces: public route traces; `trace_experts` experts a layer;
        `slots_per_layer`: cache sizes.
    """

    checkpoint: str = "default"
    data_dir: str | None = None
    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
    budgets: Sequence[str] = ("15%", "25%", "50%")
    batches: Sequence[int] = (1, 3)
    rounds: int = 3
    prompt_tokens: int = 48
    new_tokens: int = 32
    history: int = 8
    a: float = 0.2
    link_factor: float = 2.0
    link_latency_s: float = 50e-6
    fidelity_rows: int = 6
    horizon: int = 3
    lengths: Sequence[int] = (32, 128, 512)
    traces: Sequence[str] = ()
    trace_experts: int = 128
    slots_per_layer: Sequence[int] = (13, 32, 64)

    def __post_init__(self):
        """Refuses what no study could run with.

        Raises:
          ConfigError: a size that is not positive, an empty list, `a` out of range.
        """
        for name in (
            *("rounds", "prompt_tokens", "history", "fidelity_rows", "horizon"),
            "trace_experts",
        ):
            check_count(name, getattr(self, name))
        for name in ("batches", "lengths", "slots_per_layer"):
            for value in self._listed(name):
                check_count(name, value)
        for budget in self._listed("budgets"):
            OffloadOptions(device_memory=budget)
        if self.new_tokens < 2:
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, expected at least 2: one decode step"
            )
        if not 0 <= self.a < 1:
            raise ConfigError(f"a must lie in [0, 1), got {self.a}")
        check_positive("link_factor", self.link_factor)

    def _listed(self, name: str) -> Sequence:
        values = getattr(self, name)
        if isinstance(values, str) or not len(values):
            raise ConfigError(f"{name} is {values!r}, expected a list of at least one")
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a study found: parts of a results entry.

    Attributes:
      entry: arguments of `results.Entry`.
      plot: draws the picture.
      summary: for the last line of the script.
      files: further files of the entry, text by name.
    """

    entry: dict[str, Any]
    plot: Callable[[Path], None]
    summary: dict[str, Any]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


def claim(source: str, paper: Mapping[str, Any], ours: Mapping[str, Any], why: str):
    """`paper_claim` of an entry: the paper's numbers, ours, and why they differ."""
    known = {"source": source, "paper": dict(paper), "ours": dict(ours)}
    return known | {"why_they_differ": why}


def check_name(name: str, known) -> None:
    """Raises ConfigError for a study that does not exist."""
    check_known("study", name, known)


def write_study(
    name: str,
    out_dir: str,
    entry: Entry,
    found: Findings,
    *,
    config_text: Callable[[], str],
    overwrite: bool,
    pictures: Mapping[str, Callable[[Path], None]] | None = None,
) -> dict[str, Any]:
    """Writes a study's entry; returns what its script prints last."""
    write_entry(
        out_dir,
        entry,
        plot=found.plot,
        config_text=config_text(),
        overwrite=overwrite,
        files=found.files,
        pictures=pictures,
    )
    return {
        "study": name,
        **found.summary,
        "checks": dict(entry.checks),
        "seconds": time.time() - entry.started_s,
        "out_dir": out_dir,
    }
