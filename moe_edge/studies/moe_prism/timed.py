"""The timed studies' settings and rows, until prompts.py and rounds.py have them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moe_edge.core.checks import ConfigError, check_count, check_positive
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import Panel
from moe_edge.metrics.results import metric
from moe_edge.offload.link import EmulatedLink
from moe_edge.studies.study import median_and_spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    checkpoint: str = "default"
    data_dir: str | None = None
    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
    rounds: int = 3
    prompt_tokens: int = 48
    new_tokens: int = 24

    def __post_init__(self):
        for name in ("rounds", "prompt_tokens"):
            check_count(name, getattr(self, name))
        if self.new_tokens < 2:
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, expected at least 2: one decode step"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSettings(PromptSettings):
    link_factor: float = 2.0
    link_latency_s: float = 50e-6

    def __post_init__(self):
        super().__post_init__()
        check_positive("link_factor", self.link_factor)


def check_list(name: str, values: Sequence) -> Sequence:
    if isinstance(values, str) or not len(values):
        raise ConfigError(f"{name} is {values!r}, expected a list of at least one")
    return values


def linked(options: OffloadOptions, budget: str, link: EmulatedLink) -> OffloadOptions:
    return dataclasses.replace(
        options,
        device_memory=budget,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
    )


def median_metric(
    policy: str, name: str, values: Sequence[float], unit: str, scale: float = 1.0
) -> dict[str, Any]:
    value, (kind, width) = median_and_spread(values)
    return metric(policy, name, scale * value, unit, len(values), (kind, scale * width))


def median_panel(
    title: str,
    y_label: str,
    x: Sequence,
    rounds_of: Mapping[str, Sequence[Sequence[float]]],
    scale: float = 1.0,
    **options,
) -> Panel:
    series, spreads = {}, {}
    for label, by_x in rounds_of.items():
        found = [median_and_spread(rounds) for rounds in by_x]
        series[label] = [scale * value for value, _ in found]
        spreads[label] = [scale * width for _, (_, width) in found]
    return Panel(title, y_label, x, series, spreads, **options)
