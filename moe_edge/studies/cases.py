"""The cases of a study, made ready: engines on a link made from measured compute."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.link import EmulatedLink
from moe_edge.studies.engines import Bench, StudyEngine, record_history
from moe_edge.studies.prompts import PromptPool, make_pool
from moe_edge.studies.smoe.settings import Settings


@dataclasses.dataclass(frozen=True)
class Case:
    """One policy at one budget and batch size.

    Attributes:
      policy: its name in tables.
      options: how it runs; the study adds budget and link.
      is_exact: its tokens must be the resident engine's; a case that is not carries
        its fidelity: lossy routes, and the host's experts, whose sums have another
        order.
    """

    policy: str
    budget: str
    batch: int
    options: OffloadOptions
    is_exact: bool = True

    @property
    def setting(self) -> str:
        return f"{self.budget}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a study measures with.

    Attributes:
      engines: one a case, in their order; all programs are compiled.
      rounds: prompts of each round, as many as the widest batch; no two are equal.
      layer_s: resident compute of a layer; `link` was made from it.
      pool: where the prompts came from.
      first_layer: the first one with experts.
    """

    engines: Sequence[StudyEngine]
    rounds: Sequence[list[list[int]]]
    layer_s: float
    link: EmulatedLink
    pool: PromptPool
    first_layer: int = 0

    def workload(self, settings: Settings) -> dict:
        """What was run, for the entry."""
        return {
            "prompts": list(self.pool.sources),
            "prompt_tokens": settings.prompt_tokens,
            "new_tokens": settings.new_tokens,
            "rounds": settings.rounds,
            "history": settings.history,
            "budgets": list(settings.budgets),
            "batches": list(settings.batches),
            "a": settings.a,
            "link": describe_link(self.link, self.layer_s, settings),
        }


def describe_link(link: EmulatedLink, layer_s: float, settings: Settings) -> dict:
    """The link, and what it was made from."""
    return link.describe() | {
        "expert_load_in_layers_of_compute": settings.link_factor,
        "layer_compute_s": layer_s,
    }


def past_sequences(bench: Bench, settings: Settings) -> list[dict]:
    """What was routed before the study: prompts that no round measures."""
    pool = make_pool(
        settings, bench.tokenizer, settings.history, settings.prompt_tokens
    )
    return record_history(bench.resident, pool.rows, settings.new_tokens)


def count_history(history, num_layers: int, num_experts: int) -> np.ndarray:
    """int [L, E], tokens of past sequences that chose each expert."""
    counts_LE = np.zeros((num_layers, num_experts + 1), np.int64)
    for ids_of in history:
        for layer, ids_TK in ids_of.items():
            np.add.at(counts_LE[layer], ids_TK.reshape(-1), 1)
    return counts_LE[:, :num_experts]


def prepare(
    bench: Bench, cases: Sequence[Case], settings: Settings, history=None
) -> Ready:
    """Builds the engines of all cases and compiles everything they will run.

    Args:
      bench: the checkpoint.
      cases: with options that name no link.
      settings: sizes.
      history: of `past_sequences`, if it is known.
    """
    batches = tuple(dict.fromkeys(case.batch for case in cases))
    widest = max(batches)
    count = settings.history + widest * (settings.rounds + 1)
    pool = make_pool(settings, bench.tokenizer, count, settings.prompt_tokens)
    past, warm, *rounds = pool.batches(
        [settings.history, *[widest] * (settings.rounds + 1)]
    )
    layer_s = bench.layer_seconds(past, settings.new_tokens, settings.rounds)
    link = bench.standard_link(layer_s, settings.link_factor, settings.link_latency_s)
    history = past_sequences(bench, settings) if history is None else history
    engines = []
    for case in cases:
        options = dataclasses.replace(
            case.options,
            device_memory=case.budget,
            link_bytes_per_s=link.bytes_per_s,
            link_latency_s=link.latency_s,
        )
        engine = bench.engine(options, case.batch)
        engine.manager.predictor_run.learn(history)
        engines.append(engine)
    for batch in batches:
        generate(bench.resident, warm[:batch], settings.new_tokens)
    for case, engine in zip(cases, engines, strict=True):
        # Whether the host helps in the first step is chance: a whole generation then.
        start = warm_up if engine.assist is None else generate
        start(engine, warm[: case.batch], settings.new_tokens)
    return Ready(engines, rounds, layer_s, link, pool, bench.config.moe_layers[0])
