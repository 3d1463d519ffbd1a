"""The cases of a study, made ready: engines on a link made from measured compute."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.engines import Bench, record_history
from moe_edge.bench.prompts import (
    AnyLinkSettings,
    LinkSettings,
    PromptPool,
    PromptSettings,
    make_pool,
)
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.inline import is_inline
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.link import EmulatedLink, TransferLink


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSettings(AnyLinkSettings, PromptSettings):
    """A study of offloaded cases; `AnyLinkSettings` and `PromptSettings` name the rest.

    Attributes:
      batches: sequences that decode together.
      history: sequences shown beforehand to what learns from past ones.
    """

    batches: Sequence[int] = (1, 3)
    history: int = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One policy at one budget and batch size.

    Attributes:
      policy: its name in tables.
      options: how it runs; the study adds budget and link.
      host_loads: what an expert takes on an emulated host, in times of its load; None:
        the host as it is.
    """

    policy: str
    budget: str
    batch: int
    options: OffloadOptions
    host_loads: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must be the resident engine's. A case that is not carries
        its fidelity: lossy routes, and the host's experts, summed in another order."""
        return self.options.lossless and self.options.assist is None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.policy, self.budget, self.batch


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a study measures with.

    Attributes:
      engines: one a case, in their order; all programs are compiled.
      rounds: prompts of each round, as many as the widest batch; no two are equal.
      layer_s: resident compute of a layer; an emulated `link` was made from it.
      load_s: of an expert over `link`, alone.
      pool: where the prompts came from.
      first_layer: the first one with experts.
    """

    engines: Sequence[LayeredEngine]
    rounds: Sequence[list[list[int]]]
    layer_s: float
    link: TransferLink
    pool: PromptPool
    first_layer: int = 0
    load_s: float = 0.0

    @property
    def kind(self) -> str:
        """Of the entry's times."""
        return "emulated" if self.link.emulated else "measured"

    def workload(self, settings: CaseSettings) -> dict[str, Any]:
        """What was run, for the entry."""
        link = describe_link(self.link, self.layer_s, settings, self.load_s)
        return workload_of(settings, self.pool) | {"link": link}


def workload_of(settings: PromptSettings, pool: PromptPool) -> dict[str, Any]:
    """`workload` of an entry: the prompts, and the settings that size the study."""
    elsewhere = ("checkpoint", "data_dir", "sources", "link_factor", "link_latency_s")
    fields = dataclasses.asdict(settings).items()
    sizes = {name: value for name, value in fields if name not in elsewhere}
    return {"prompts": list(pool.sources)} | sizes


def describe_link(
    link: TransferLink, layer_s: float, settings: LinkSettings, load_s: float = 0.0
) -> dict:
    """The link, what it was made from, and whether programs run inline.

    Args:
      load_s: of an expert over a link that is not emulated.
    """
    factor = settings.link_factor if link.emulated else load_s / layer_s
    return link.describe() | {
        "expert_load_in_layers_of_compute": factor,
        "layer_compute_s": layer_s,
        "programs": "inline" if is_inline() else "asynchronous",
    }


def past_prompts(settings: CaseSettings, tokenizer: Tokenizer) -> PromptPool:
    """Prompts that no round measures."""
    return make_pool(settings, tokenizer, settings.history, settings.prompt_tokens)


def past_sequences(bench: Bench, settings: CaseSettings) -> list[dict]:
    """What was routed before the study, of `past_prompts`."""
    pool = past_prompts(settings, bench.tokenizer)
    return record_history(bench.resident, pool.rows, settings.new_tokens)


def prompts_of(
    settings: CaseSettings, tokenizer: Tokenizer, widest: int
) -> tuple[PromptPool, list[list[list[int]]]]:
    """Where the prompts of a study come from, and these: of the past, to warm up, and
    of each round, as many as the widest batch."""
    sizes = [settings.history, *[widest] * (settings.rounds + 1)]
    pool = make_pool(settings, tokenizer, sum(sizes), settings.prompt_tokens)
    return pool, pool.batches(sizes)


def count_history(history, num_layers: int, num_experts: int) -> np.ndarray:
    """int [L, E], tokens of past sequences that chose each expert."""
    counts_LE = np.zeros((num_layers, num_experts + 1), np.int64)
    for ids_of in history:
        for layer, ids_TK in ids_of.items():
            np.add.at(counts_LE[layer], ids_TK.reshape(-1), 1)
    return counts_LE[:, :num_experts]


def on_link(case: Case, link: TransferLink, block_bytes: int) -> OffloadOptions:
    """A case's options, over a link like this one.

    Raises:
      ConfigError: an emulated host next to a link that is not.
    """
    options = linked(case.options, case.budget, link)
    if case.host_loads is None or options.assist is None:
        return options
    if not isinstance(link, EmulatedLink):
        raise ConfigError(
            f"host_loads is {case.host_loads} and the link is the machine's own; an "
            "emulated host needs an emulated link"
        )
    expert_s = case.host_loads * link.seconds(block_bytes)
    return dataclasses.replace(options, assist_expert_s=expert_s)


def linked(options: OffloadOptions, budget: str, link: TransferLink) -> OffloadOptions:
    """The options under this budget and over a link like this one."""
    options = dataclasses.replace(options, device_memory=budget)
    if not isinstance(link, EmulatedLink):
        return options
    rates = {"link_bytes_per_s": link.bytes_per_s, "link_latency_s": link.latency_s}
    return dataclasses.replace(options, **rates)


def prepare(
    bench: Bench, cases: Sequence[Case], settings: CaseSettings, history=None
) -> Ready:
    """Builds the engines of all cases and compiles everything they will run.

    Args:
      cases: with options that name no link.
      history: of `past_sequences`, if it is known.
    """
    batches = tuple(dict.fromkeys(case.batch for case in cases))
    pool, (past, warm, *rounds) = prompts_of(settings, bench.tokenizer, max(batches))
    layer_s = bench.layer_seconds(past, settings.new_tokens)
    link = bench.link_of(settings, layer_s)
    load_s = bench.load_seconds(link)
    history = past_sequences(bench, settings) if history is None else history
    engines = []
    for case in cases:
        options = on_link(case, link, bench.store.block_bytes)
        engine = bench.engine(options, case.batch)
        engine.predictor_run.learn(history)
        engines.append(engine)
    for batch in batches:
        generate(bench.resident, warm[:batch], settings.new_tokens)
    for case, engine in zip(cases, engines, strict=True):
        # Whether the host helps in the first step is chance: a whole generation then.
        start = generate if engine.backends else warm_up
        start(engine, warm[: case.batch], settings.new_tokens)
    first_layer = bench.config.moe_layers[0]
    return Ready(engines, rounds, layer_s, link, pool, first_layer, load_s)
