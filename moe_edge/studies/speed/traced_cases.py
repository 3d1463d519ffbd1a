"""The engines of suite `traced`: which models, offloaded in which ways, timed how."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated

import jax
import numpy as np

from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import seconds_of
from moe_edge.bench.settings import known
from moe_edge.bench.speed import MS, SuiteSettings
from moe_edge.core.checks import check_count
from moe_edge.engine.base import Engine
from moe_edge.engine.offloaded import assemble
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights, load_weights, to_device
from moe_edge.offload.store import HostStore, pin_records
from moe_edge.studies.speed.models import olmoe_config
from moe_edge.studies.speed.traced_model import TracedReader

TRACE_EXPERTS = 128
TOP_K = 6  # what the trace holds
STEPS = {1: 32, 8: 12}  # batch -> timed tokens of a row; as many warm the cache before
PROMPT = 512  # tokens of the prefill
APART = 16  # steps of the trace between two rows of a batch
BUDGETS = ("25%", "50%")
# Name -> options of an offloaded engine.
WAYS = {
    "fused": {"mode": "fused"},
    "fused zero copy": {"mode": "fused", "zero_copy": True},
    "layered": {"mode": "layered"},
    "layered packed": {"mode": "layered", "layer_io": "packed"},
    "layered direct": {"mode": "layered", "layer_io": "direct"},
}
SHAPES = ("olmoe_7b", "deepseek_v2_lite_16b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedSettings(SuiteSettings):
    """What suite `traced` reads; `SuiteSettings` names the rest.

    Attributes:
      data_dir: where `trace` is looked up.
      trace: route trace with TOP_K experts a token.
      shapes: of SHAPES, the models on a GPU.
      ways: of WAYS, the offloaded engines.
      budgets: of BUDGETS, shares of the experts that they hold.
      prefill: whether prompts of PROMPT tokens are timed, too, at 50 %; compiling them
        is most of the suite's time.
      threads: engines that are compiled at once, before any is timed.
    """

    data_dir: str = "../shared/data"
    trace: str = "routing/trace_qwen3_30b_a3b.csv.gz"
    shapes: tuple[Annotated[str, known("model shape", SHAPES)], ...] = SHAPES
    ways: tuple[Annotated[str, known("way", WAYS)], ...] = ("fused", "layered")
    budgets: tuple[Annotated[str, known("budget", BUDGETS)], ...] = BUDGETS
    prefill: bool = True
    threads: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_count("number of model shapes", len(self.shapes))
        check_count("number of ways", len(self.ways))
        check_count("number of budgets", len(self.budgets))


DEEPSEEK_V2_LITE = {  # 16 B; what is left out is the family's default
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": TOP_K,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}


def models(shapes=SHAPES) -> dict[str, dict]:
    """Name -> Hugging Face config of what this device can run, with TOP_K."""
    if jax.default_backend() == "cpu":
        found = {"olmoe_450m": olmoe_config(8, "bfloat16")}
    else:  # in the shape of OLMoE-1B-7B
        olmoe = olmoe_config(16, "bfloat16", hidden=2048, heads=16)
        known = {"olmoe_7b": olmoe | {"vocab_size": 50304}}
        known["deepseek_v2_lite_16b"] = DEEPSEEK_V2_LITE
        found = {name: known[name] for name in shapes}
    top = {"num_experts_per_tok": TOP_K}
    return {name: config | top for name, config in found.items()}


def decode_ms(engine: Engine, batch: int, vocabulary: int) -> float:
    """Mean milliseconds of a step, after as many untimed ones.

    Args:
      batch: rows; each APART steps of the trace behind the one before.
      vocabulary: tokens that stand for a step of the trace.
    """
    steps = STEPS[batch]
    session = engine.new_session(batch, 2 * steps)
    active_B = jax.device_put(np.ones(batch, bool))
    started, rows_B = 0.0, APART * np.arange(batch, dtype=np.int32)
    for step in range(2 * steps):
        if step == steps:
            engine.reset_records()
            started = time.perf_counter()
        tokens_B = jax.device_put((rows_B + np.int32(step)) % np.int32(vocabulary))
        # The next token is known beforehand, but a user waits for every one.
        engine.decode(session, tokens_B, active_B).block_until_ready()
    return MS * (time.perf_counter() - started) / steps


def prefill_ms(engine: Engine, vocabulary: int) -> float:
    """Milliseconds up to the logits after a prompt of PROMPT tokens."""
    session = engine.new_session(1, PROMPT)
    prompt = (np.arange(PROMPT) % vocabulary).tolist()
    engine.reset_records()
    run = functools.partial(engine.prefill, session, [prompt])
    return MS * seconds_of(lambda: run().block_until_ready())


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: an engine at a batch, or at a prefill (batch 0)."""

    engine: Engine
    batch: int
    vocabulary: int

    def __call__(self) -> tuple[float, dict]:
        """Milliseconds, and what moved."""
        if self.batch:
            took_ms = decode_ms(self.engine, self.batch, self.vocabulary)
        else:
            took_ms = prefill_ms(self.engine, self.vocabulary)
        return took_ms, self.engine.movement()

    @property
    def label(self) -> str:
        return f"batch{self.batch}" if self.batch else f"prefill{PROMPT}"


def cases_of(
    reader: TracedReader, stack: ExitStack, steps: int, settings: TracedSettings
) -> Iterator:
    """(way, budget, batch) -> Case; one engine of each way and budget."""
    dense = load_weights(reader, with_experts=False)
    resident = ResidentEngine(with_experts(dense, reader))
    engines = {("resident", "100%"): resident}
    memory = "host" if jax.default_backend() == "cpu" else "pinned"
    store = HostStore(reader, memory)
    hosts = pinned_layers(reader)
    for budget, way in itertools.product(settings.budgets, settings.ways):
        options = studied(
            device_memory=budget,
            memory="host" if WAYS[way]["mode"] == "fused" else memory,
            **WAYS[way],
        )
        engine = assemble(options, dense, store, hosts=hosts)
        engines[way, budget] = stack.enter_context(engine)
    for (way, budget), engine in engines.items():
        with_prompt = settings.prefill and budget != "25%"
        for batch in [*STEPS, 0] if with_prompt else STEPS:
            yield (way, budget, batch), Case(engine, batch, steps)


def with_experts(dense: Weights, reader: TracedReader) -> Weights:
    experts = [
        to_device(reader.experts(layer)) if layer in reader.config.moe_layers else None
        for layer in range(reader.config.num_layers)
    ]
    return dataclasses.replace(dense, experts=tuple(experts))


def pinned_layers(reader: TracedReader) -> list[jax.Array | None]:
    """Records of each layer for mode fused, which all budgets share."""
    store_dtype = to_device(np.zeros((1, 1), reader.dtype)).dtype
    return [
        pin_records(reader.experts(layer).view(store_dtype)).block_until_ready()
        if layer in reader.config.moe_layers
        else None
        for layer in range(reader.config.num_layers)
    ]


def run_once(cases: dict, threads: int) -> None:
    """Runs every case once, engines beside one another."""
    by_engine: dict[int, list[Case]] = {}
    for case in cases.values():
        by_engine.setdefault(id(case.engine), []).append(case)
    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(lambda its: [case() for case in its], by_engine.values()):
            del done
