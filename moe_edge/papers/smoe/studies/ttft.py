"""Time to first token: experts on demand, layer-wise, and resident (SMoE fig. 13)."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moe_edge.bench.cases import (
    INLINE_LIMIT,
    LIMITS,
    describe_link,
    linked,
    workload_of,
)
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import LinkSettings, PromptPool, check_inputs, make_pool
from moe_edge.bench.rounds import measure_rounds, median_metric, median_panel
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import metric
from moe_edge.offload.link import EmulatedLink
from moe_edge.papers.smoe.studies import fig14
from moe_edge.papers.smoe.studies.layerwise import LayerwiseEngine

RESIDENT, LAYERWISE = "resident", "layer-wise"
PAPER_CHANGE = -0.11  # against the best existing approach, mean; section VI-B


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftSettings(LinkSettings):
    """`LinkSettings` names the rest; `prompt_tokens` and `new_tokens` are of the runs
    that a layer's compute is taken from.

    Attributes:
      device_memory: of the experts.
      a: SMoE's margin.
      lengths: tokens of the measured prompts.
    """

    sources: Sequence[str] = ("text/wikipedia_en.txt", "text/c4_web.txt")
    rounds: int = 5
    prompt_tokens: int = 48
    new_tokens: int = 32
    device_memory: str = "25%"
    a: float = 0.2
    lengths: Sequence[int] = (32, 128, 512)


class Waited(NamedTuple):
    """Of every round: seconds to the first token, bytes moved for it, the tokens."""

    ttft_s: Sequence[float]
    moved_bytes: Sequence[float]
    tokens: Sequence


Found = dict[tuple[str, int], Waited]  # by policy and prompt length


def policies(a: float) -> dict[str, OffloadOptions]:
    """The offloaded engines."""
    return {
        "on_demand": studied(eviction="on_demand"),
        "lru": studied(eviction="lru"),
        "smoe": fig14.smoe_steps(a)["+BA"],
    }


def run(settings: TtftSettings) -> Findings:
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
            found, pool = measure(bench, engines, settings)
    workload = workload_of(settings, pool)
    workload["link"] = describe_link(link, layer_s, settings)
    return findings(bench.model, found, workload, settings)


def measure(
    bench: Bench, engines: dict, settings: TtftSettings
) -> tuple[Found, PromptPool]:
    """Interleaves the engines within rounds, one prompt length after the other."""
    found: Found = {}
    calls = {name: functools.partial(_wait, one) for name, one in engines.items()}
    for length in settings.lengths:
        pool = make_pool(settings, bench.tokenizer, settings.rounds + 1, length)
        warm, *prompts = pool.rows
        measured = measure_rounds(calls, prompts, warm=[warm])
        for policy, rounds in measured.figures.items():
            found[policy, length] = Waited(*zip(*rounds, strict=True))
    return found, pool


def _wait(engine, prompt):
    """(seconds to the first token, bytes moved, tokens)."""
    engine.reset_records()
    result = generate(engine, [prompt], 1)
    return result.ttft_s, engine.movement()["bytes_moved"], result.tokens


def findings(
    model: dict, found: Found, workload: dict, settings: TtftSettings
) -> Findings:
    """The entry from what was measured."""
    rows, changes, details, budget = [], {}, [], settings.device_memory
    for (policy, length), one in found.items():
        at = f"{length} prompt tokens"
        rows.append(median_metric(policy, f"TTFT, {at}", one.ttft_s, "s"))
        moved = 1e-6 * statistics.median(one.moved_bytes)
        rows.append(metric(policy, f"moved, {at}", moved, "MB", len(one.moved_bytes)))
    for length in settings.lengths:
        ours, layers, resident = (
            statistics.median(found[policy, length].ttft_s)
            for policy in ("smoe", LAYERWISE, RESIDENT)
        )
        changes[length] = ours / layers - 1
        details.append(
            f"{length} tokens: {ours:.3f} s, layer-wise {layers:.3f} s, resident "
            f"{resident:.3f} s."
        )
    told = ", ".join(f"{n} tokens {100 * v:+.0f} %" for n, v in changes.items())
    return Findings(
        answer=f"With {budget} of the experts on the device, SMoE against layer-wise "
        f"offload: {told} (the paper: {100 * PAPER_CHANGE:.0f} % against the best "
        "existing approach).",
        details=details,
        model=model,
        workload=workload,
        metrics=rows,
        limits=[
            *LIMITS[:2],
            INLINE_LIMIT,
            "Batch 1. The caches hold what the prompt before left in them.",
            "Layer-wise offload has room for two whole layers on the device, however "
            f"much that is, not {budget}.",
        ],
        kind="emulated",
        baselines=[RESIDENT, LAYERWISE, "on_demand", "lru"],
        checks={
            "every engine gave the resident engine's first token in every round": all(
                list(one.tokens) == list(found[RESIDENT, length].tokens)
                for (_, length), one in found.items()
            )
        },
        ours={f"against layer-wise, {n} tokens": v for n, v in changes.items()},
        plot=lambda path: plot(path, found, settings),
        summary={"ttft_change": changes},
    )


def plot(path, found: Found, settings: TtftSettings) -> None:
    """Seconds to the first token by prompt length, a line an engine."""
    names = dict.fromkeys(policy for policy, _ in found)
    panel = median_panel(
        f"{settings.device_memory} of the experts on the device, emulated link",
        "seconds",
        list(settings.lengths),
        {name: [found[name, n].ttft_s for n in settings.lengths] for name in names},
        x_label="prompt tokens",
        log=True,
    )
    draw_panels(path, [panel], title="Time to first token", columns=1)


STUDY = Study(
    name="smoe_ttft",
    question="How long until the first token with a part of the experts on the device "
    "(SMoE fig. 13)?",
    settings=TtftSettings,
    measure=run,
    check=check_inputs,
    inline=True,
    claim=Claim(
        source="SMoE, section VI-B, fig. 13: TTFT against the best existing approach",
        paper={"change": PAPER_CHANGE},
        why="The paper credits its pipelining of CPU, GPU and link. Ours overlaps "
        "transfers with compute too, expert by expert, but the host computes nothing "
        "in prefill and nothing is substituted there, so only what the cache kept "
        "saves transfers; against layer-wise offload, prompts that do not need every "
        "expert save the rest.",
    ),
)
