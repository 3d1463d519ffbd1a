"""Time to first token: experts on demand, layer-wise, and resident (SMoE fig. 13)."""

import dataclasses

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.offload.link import EmulatedLink
from moe_edge.studies.cases import describe_link
from moe_edge.studies.engines import Bench
from moe_edge.studies.prompts import PromptPool, make_pool
from moe_edge.studies.smoe import fig14
from moe_edge.studies.smoe.layerwise import LayerwiseEngine
from moe_edge.studies.smoe.settings import LIMITS, Findings, Settings, claim
from moe_edge.studies.study import median_and_spread

RESIDENT, LAYERWISE = "resident", "layer-wise"
PAPER_CHANGE = -0.11  # against the best existing approach, mean; section VI-B
WHY = (
    "The paper credits its pipelining of CPU, GPU and link. Ours overlaps transfers "
    "with compute too, expert by expert, but the host computes nothing in prefill and "
    "nothing is substituted there, so only what the cache kept saves transfers; "
    "against layer-wise offload, prompts that do not need every expert save the rest."
)


@dataclasses.dataclass
class Waited:
    """Seconds to the first token, and bytes moved for it, one of each a round."""

    ttft_s: list[float] = dataclasses.field(default_factory=list)
    moved_bytes: list[float] = dataclasses.field(default_factory=list)
    is_same: list[bool] = dataclasses.field(default_factory=list)


Found = dict[tuple[str, int], Waited]  # by policy and prompt length


def policies(a: float) -> dict[str, OffloadOptions]:
    """The offloaded engines."""
    return {
        "on_demand": OffloadOptions(eviction="on_demand"),
        "lru": OffloadOptions(eviction="lru"),
        "smoe": fig14.smoe_steps(a)["+BA"],
    }


def run(settings: Settings) -> tuple[dict, Findings]:
    """Measures all lengths; returns the model and the findings.

    Raises:
      ConfigError: a prompt that leaves no room in the model's context.
    """
    budget = settings.budgets[0]
    with Bench(settings.checkpoint) as bench:
        longest, limit = max(settings.lengths), bench.config.max_positions
        if longest >= limit:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in the model's context "
                f"of {limit}; shorten `lengths`"
            )
        past = make_pool(settings, bench.tokenizer, 2, settings.prompt_tokens)
        layer_s = bench.layer_seconds(past.rows, settings.new_tokens, settings.rounds)
        link = bench.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )
        layerwise = LayerwiseEngine(
            bench.weights, bench.store, EmulatedLink(link.bytes_per_s, link.latency_s)
        )
        engines = {RESIDENT: bench.resident, LAYERWISE: layerwise}
        for policy, options in policies(settings.a).items():
            engines[policy] = bench.engine(
                dataclasses.replace(
                    options,
                    device_memory=budget,
                    link_bytes_per_s=link.bytes_per_s,
                    link_latency_s=link.latency_s,
                )
            )
        try:
            found, pool = measure(bench, engines, settings)
        finally:
            layerwise.close()
    return bench.model, findings(found, pool, link, layer_s, settings)


def measure(
    bench: Bench, engines: dict, settings: Settings
) -> tuple[Found, PromptPool]:
    """Compiles every length, then interleaves engines within rounds."""
    found: Found = {}
    for length in settings.lengths:
        pool = make_pool(settings, bench.tokenizer, settings.rounds + 1, length)
        warm, *prompts = pool.rows
        for policy, engine in engines.items():
            generate(engine, [warm], 1)
            found[policy, length] = Waited()
        for prompt in prompts:
            expected = None
            for policy, engine in engines.items():
                engine.reset_records()
                result = generate(engine, [prompt], 1)
                expected = expected or result.tokens  # the resident engine is first
                one = found[policy, length]
                one.ttft_s.append(result.ttft_s)
                one.moved_bytes.append(engine.movement()["bytes_moved"])
                one.is_same.append(result.tokens == expected)
    return found, pool


def findings(
    found: Found, pool: PromptPool, link: EmulatedLink, layer_s: float, settings
) -> Findings:
    """The entry from what was measured."""
    rows = []
    for (policy, length), one in found.items():
        value, spread = median_and_spread(one.ttft_s)
        n, name = len(one.ttft_s), f"{length} prompt tokens"
        rows.append(metric(policy, f"TTFT, {name}", value, "s", n, spread))
        moved = np.median(one.moved_bytes) * 1e-6
        rows.append(metric(policy, f"moved, {name}", moved, "MB", n))
    changes, parts = {}, []
    for length in settings.lengths:
        ours, layers, resident = (
            float(np.median(found[policy, length].ttft_s))
            for policy in ("smoe", LAYERWISE, RESIDENT)
        )
        changes[length] = ours / layers - 1
        parts.append(
            f"{length} tokens: {ours:.3f} s, layer-wise {layers:.3f} s "
            f"({100 * changes[length]:+.0f} %), resident {resident:.3f} s"
        )
    budget = settings.budgets[0]
    entry = {
        "question": f"How long until the first token with {budget} of the experts on "
        "the device (SMoE fig. 13)?",
        "answer": f"{'; '.join(parts)} (the paper: {100 * PAPER_CHANGE:.0f} % against "
        "the best existing approach).",
        "kind": "emulated",
        "workload": {
            "prompts": list(pool.sources),
            "lengths": list(settings.lengths),
            "rounds": settings.rounds,
            "budget": budget,
            "a": settings.a,
            "link": describe_link(link, layer_s, settings),
        },
        "metrics": rows,
        "baselines": [RESIDENT, LAYERWISE, "on_demand", "lru"],
        "checks": {
            "every engine gave the resident engine's first token in every round": all(
                all(one.is_same) for one in found.values()
            )
        },
        "limits": [
            *LIMITS[:2],
            "Batch 1. The caches hold what the prompt before left in them.",
            "Layer-wise offload has room for two whole layers on the device, however "
            f"much that is, not {budget}.",
            WHY,
        ],
        "paper_claim": claim(
            "SMoE, section VI-B and fig. 13: TTFT against the best existing approach",
            {"change": PAPER_CHANGE},
            {f"against layer-wise, {n} tokens": v for n, v in changes.items()},
            WHY,
        ),
    }

    def plot(path) -> None:
        names = list(dict.fromkeys(policy for policy, _ in found))
        series, spreads = {}, {}
        for name in names:
            pairs = [median_and_spread(found[name, n].ttft_s) for n in settings.lengths]
            series[name] = [value for value, _ in pairs]
            spreads[name] = [spread[1] for _, spread in pairs]
        panel = Panel(
            f"{budget} of the experts on the device, emulated link",
            "seconds",
            list(settings.lengths),
            series,
            spreads,
            x_label="prompt tokens",
            log=True,
        )
        line_panels(path, [panel], title="Time to first token", columns=1)

    return Findings(entry=entry, plot=plot, summary={"ttft_change": changes})
