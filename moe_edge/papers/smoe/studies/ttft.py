"""Time to first token: experts on demand, layer-wise, and resident (SMoE fig. 13)."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moe_edge.bench.cases import describe_link, linked, workload_of
from moe_edge.bench.derived import over
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import (
    LinkSettings,
    PromptPool,
    PromptSettings,
    check_inputs,
    make_pool,
)
from moe_edge.bench.rounds import measure_rounds
from moe_edge.bench.settings import Budget, Margin, Steps
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Rows, Tables, counted, frame, median
from moe_edge.offload.link import EmulatedLink
from moe_edge.papers.smoe.studies import fig14
from moe_edge.papers.smoe.studies.layerwise import LayerwiseEngine

RESIDENT, LAYERWISE = "resident", "layer-wise"
SAME = "every engine gave the resident engine's first token in every round"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftSettings(LinkSettings, PromptSettings):
    """Its parts name the rest; `prompt_tokens` and `new_tokens` are of the runs
    that a layer's compute is taken from.

    Attributes:
      device_memory: of the experts.
      a: SMoE's margin.
      lengths: tokens of the measured prompts.
    """

    sources: Sequence[str] = ("text/wikipedia_en.txt", "text/c4_web.txt")
    rounds: int = 5
    prompt_tokens: int = 48
    new_tokens: Steps = 32
    device_memory: Budget = "25%"
    a: Margin = 0.2
    lengths: Sequence[int] = (32, 128, 512)


def policies(a: float) -> dict[str, OffloadOptions]:
    """The offloaded engines."""
    return {
        "on_demand": studied(eviction="on_demand"),
        "lru": studied(eviction="lru"),
        "smoe": fig14.smoe_steps(a)["+BA"],
    }


def measure(settings: TtftSettings, rows: Rows) -> None:
    """Measures all lengths.

    Raises:
      ConfigError: a prompt that leaves no room in the model's context.
    """
    with Bench(settings.checkpoint) as bench:
        longest, limit = max(settings.lengths), bench.config.max_positions
        if longest >= limit:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in the model's context "
                f"of {limit}; shorten `lengths`"
            )
        past = make_pool(settings, bench.tokenizer, 2, settings.prompt_tokens)
        layer_s = bench.layer_seconds(past.rows, settings.new_tokens)
        link = bench.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )
        own_link = EmulatedLink(link.bytes_per_s, link.latency_s)
        layerwise = LayerwiseEngine(bench.weights, bench.store, own_link)
        engines = {RESIDENT: bench.resident, LAYERWISE: layerwise}
        for policy, options in policies(settings.a).items():
            options = linked(options, settings.device_memory, link)
            engines[policy] = bench.engine(options)
        with contextlib.closing(layerwise):
            pool = wait(bench, engines, settings, rows)
    workload = workload_of(settings, pool)
    workload["link"] = describe_link(link, layer_s, settings)
    rows.about |= {"model": bench.model, "workload": workload, "kind": "emulated"}
    rows.about["baselines"] = [RESIDENT, LAYERWISE, "on_demand", "lru"]


def wait(bench: Bench, engines: dict, settings: TtftSettings, rows: Rows) -> PromptPool:
    """Interleaves the engines within rounds, one prompt length after the other."""
    calls = {name: functools.partial(_wait, one) for name, one in engines.items()}
    for length in settings.lengths:
        pool = make_pool(settings, bench.tokenizer, settings.rounds + 1, length)
        warm, *prompts = pool.rows
        tell(rows, length, measure_rounds(calls, prompts, warm=[warm]).figures)
    return pool


def tell(rows: Rows, length: int, found: Mapping[str, Sequence[tuple]]) -> None:
    """Adds what `_wait` gave each engine in every round at a prompt length."""
    first = [tokens for *_, tokens in found[RESIDENT]]
    for policy, rounds in found.items():
        ttft_s, moved_bytes, tokens = zip(*rounds, strict=True)
        moved = counted(1e-6 * statistics.median(moved_bytes), len(rounds))
        rows("waits", policy, length, ttft_s=median(ttft_s), moved_mb=moved)
        rows.checks[SAME] = rows.checks.get(SAME, True) and list(tokens) == first


def _wait(engine, prompt):
    """(seconds to the first token, bytes moved, tokens)."""
    engine.reset_records()
    result = generate(engine, [prompt], 1)
    return result.ttft_s, engine.movement()["bytes_moved"], result.tokens


def derive(tables: Tables) -> dict[str, Any]:
    """SMoE against layer-wise offload, by length."""
    waits = tables["waits"]
    changed = over(waits, "ttft_s", LAYERWISE, "tokens")
    changed["change"] = changed.over - 1
    return {"changes": changed[changed.policy == "smoe"]}


FRAMES = {"waits": frame("policy tokens", "ttft_s moved_mb")}
STUDY = Study(
    "smoe_ttft", TtftSettings, measure, FRAMES, derive, check=check_inputs, inline=True
)
