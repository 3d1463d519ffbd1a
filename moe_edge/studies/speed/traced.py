"""Suite `traced`: offloaded steps on the real link, routing from a recorded trace.

On a GPU: an OLMoE-shaped model of 7 B parameters and a DeepSeek-V2-Lite-shaped one of
16 B, experts in pinned host memory. On a CPU: one of 0.45 B, to try the suite.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax
import ml_dtypes
import numpy as np

from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import MS, Rows, SuiteSettings, make_row, speed_study
from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import check_count, check_known
from moe_edge.engine.base import Engine
from moe_edge.engine.offloaded import assemble
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights, load_weights, to_device
from moe_edge.evaluate.texts import find_file
from moe_edge.offload.store import HostStore, pin_records
from moe_edge.studies.speed import peers
from moe_edge.studies.speed.decode import (
    PROMPT_TOKENS,
    decode_rate,
    prefill_rate,
)
from moe_edge.studies.speed.models import olmoe_config
from moe_edge.studies.speed.rates import device_bandwidth, link_rate
from moe_edge.studies.speed.traced_model import TracedReader, trace_choices
from moe_edge.workload.trace_reader import read_trace

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
BAR = 1.25  # time of a step over its bound
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
    shapes: tuple[str, ...] = SHAPES
    ways: tuple[str, ...] = ("fused", "layered")
    budgets: tuple[str, ...] = BUDGETS
    prefill: bool = True
    threads: int = 8

    def __post_init__(self):
        check_count("number of model shapes", len(self.shapes))
        check_count("number of ways", len(self.ways))
        check_count("number of budgets", len(self.budgets))
        for name in self.shapes:
            check_known("model shape", name, SHAPES)
        for name in self.budgets:
            check_known("budget", name, BUDGETS)
        for name in self.ways:
            check_known("way", name, WAYS)


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


def trace_path(settings: TracedSettings) -> str:
    """Of the trace. Raises OSError where it is not found."""
    return find_file(settings.trace, settings.data_dir)


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


def traced_rows(settings: TracedSettings, work_dir) -> Rows:
    """Steps at 25 % and 50 %, layered and fused, against all resident; prefill at 50 %.

    `limit_fraction` of an offloaded row is its time over BAR times its bound: the
    larger of the resident engine's time and of the bytes that it missed at the measured
    rate of large copies. A better cache misses less, so bounds of policies differ. That
    of a resident row is the share of the time in which its weights can be read.
    """
    del work_dir
    recorded = read_trace(trace_path(settings), num_experts=TRACE_EXPERTS)
    rates = {"link": link_rate(), "memory": device_bandwidth()}
    rows = []
    for name, hf_config in models(settings.shapes).items():
        config = config_from_hf(hf_config)
        chosen_SLK = trace_choices(recorded, config)
        reader = TracedReader(config, chosen_SLK, ml_dtypes.bfloat16)
        with ExitStack() as stack:
            cases = dict(_cases(reader, stack, len(chosen_SLK), settings))
            _compile(cases, settings.threads)
            found = interleave(cases, settings.repeats)
            rows += _rows(name, cases, found, chosen_SLK, rates)
            rows += _beside_transformers(name, hf_config, cases, settings.repeats)
            del cases
        gc.collect()
    return rows


def _cases(
    reader: TracedReader, stack: ExitStack, steps: int, settings: TracedSettings
) -> Iterator:
    """(way, budget, batch) -> Case; one engine of each way and budget."""
    dense = load_weights(reader, with_experts=False)
    resident = ResidentEngine(_with_experts(dense, reader))
    engines = {("resident", "100%"): resident}
    memory = "host" if jax.default_backend() == "cpu" else "pinned"
    store = HostStore(reader, memory)
    hosts = _pinned_layers(reader)
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


def _with_experts(dense: Weights, reader: TracedReader) -> Weights:
    experts = [
        to_device(reader.experts(layer)) if layer in reader.config.moe_layers else None
        for layer in range(reader.config.num_layers)
    ]
    return dataclasses.replace(dense, experts=tuple(experts))


def _pinned_layers(reader: TracedReader) -> list[jax.Array | None]:
    """Records of each layer for mode fused, which all budgets share."""
    store_dtype = to_device(np.zeros((1, 1), reader.dtype)).dtype
    return [
        pin_records(reader.experts(layer).view(store_dtype)).block_until_ready()
        if layer in reader.config.moe_layers
        else None
        for layer in range(reader.config.num_layers)
    ]


def _compile(cases: dict, threads: int) -> None:
    """Runs every case once, engines beside one another."""
    by_engine: dict[int, list[Case]] = {}
    for case in cases.values():
        by_engine.setdefault(id(case.engine), []).append(case)
    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(lambda its: [case() for case in its], by_engine.values()):
            del done


def _rows(name: str, cases: dict, found: dict, chosen_SLK, rates: dict) -> Rows:
    rows = []
    for (way, budget, batch), case in cases.items():
        runs = found[way, budget, batch]
        ours_ms, moved = [ms for ms, _ in runs], runs[-1][1]
        unit = "ms/step" if batch else "ms"
        where = f"traced/{name}/{case.label}/{way}"
        if way == "resident":
            row = make_row(where, ours_ms, unit)
            if batch:
                row |= _read_share(case, chosen_SLK, row["ours"], rates["memory"])
            rows.append(row)
            continue
        peer_ms = [ms for ms, _ in found["resident", "100%", batch]]
        steps = STEPS.get(batch, 1)
        step_bytes = moved["bytes_moved"] / steps
        missed_ms = MS * step_bytes / rates["link"]
        bound_ms = max(statistics.median(peer_ms), missed_ms)
        rows.append(
            make_row(
                f"{where}/{budget}",
                ours_ms,
                unit,
                peer=peer_ms,
                peer_name="all experts resident",
                limit=BAR * bound_ms,
                hit_ratio=moved["hit_ratio"],
                bytes_per_step=step_bytes,
                missed_ms=missed_ms,
                over_bound=statistics.median(ours_ms) / bound_ms,
                copy_bytes_per_s=rates["link"],
            )
        )
    return rows


def _read_share(case: Case, chosen_SLK, took_ms: float, rate: float) -> dict:
    """How much of a resident step reading its weights once would take."""
    weights, steps = case.engine.weights, STEPS[case.batch]
    head = weights.top["embed" if weights.config.tie_embeddings else "head"]
    dense = sum(array.nbytes for array in jax.tree.leaves(weights.layers))
    record = next(e.nbytes / len(e) for e in weights.experts if e is not None)
    rows_B, distinct = APART * np.arange(case.batch), 0
    for step in range(steps, 2 * steps):
        chosen_BLK = chosen_SLK[(rows_B + step) % case.vocabulary]
        distinct += sum(
            len(np.unique(chosen_BLK[:, layer])) for layer in weights.config.moe_layers
        )
    step_bytes = dense + head.nbytes + record * distinct / steps
    return {
        "bytes_per_step": step_bytes,
        "bandwidth_bytes_per_s": rate,
        "limit_fraction": MS * step_bytes / rate / took_ms,
    }


def _beside_transformers(name: str, hf_config, cases: dict, repeats: int) -> Rows:
    """The resident engine beside a random `transformers` model of the same shape.

    Ours routes as the trace does, where tokens stand for its steps; the peer at random.
    """
    if jax.default_backend() == "cpu" or not peers.on_cuda():
        return []
    peer = peers.Transformers.random(hf_config)
    rng = np.random.default_rng(0)
    runs: dict[tuple[str, str], Callable] = {}
    labels = []
    for batch in (*STEPS, 0):
        case = cases.get(("resident", "100%", batch))
        if case is None:
            continue
        shape, steps = (batch or 1, PROMPT), STEPS.get(batch, 0)
        if batch:
            shape = batch, PROMPT_TOKENS
        prompts = rng.integers(0, case.vocabulary, shape)
        # Both read each token that they choose, ours beside the next step (`generate`).
        rate = functools.partial(decode_rate, case.engine, prompts, steps)
        if not batch:
            rate = functools.partial(prefill_rate, case.engine, prompts)
        runs["ours", case.label] = rate
        for way in peer.ways:
            runs[way, case.label] = functools.partial(peer.rate, way, prompts, steps)
        labels.append(case.label)
    found, rows = interleave(runs, repeats), []
    for label in labels:
        medians = {way: statistics.median(found[way, label]) for way in peer.ways}
        best = max(medians, key=medians.get)
        row = make_row(
            f"traced/{name}/{label}/resident beside transformers",
            found["ours", label],
            "tokens/s",
            peer=found[best, label],
            peer_name=f"{peer.name} {best}",
            peer_build=peer.build,
        )
        rows.append(row | {"ways": medians})
    return rows


def answer_of(rows: Rows) -> str:
    """Time over the bound, by mode; rates beside `transformers`."""
    parts = []
    for way in WAYS:
        if over := [r["over_bound"] for r in rows if f"/{way}/" in r["case"]]:
            parts.append(f"{way} {min(over):.2f} to {max(over):.2f}")
    found = (
        "Times over the larger of the resident engine's and their missed bytes at the "
        f"link's rate: {', '.join(parts)}."
    )
    ratios = [f"{row['ratio']:.1f}" for row in rows if "peer_build" in row]
    if ratios:
        found += f" Resident tokens/s over transformers': {', '.join(ratios)}."
    return found


LIMIT = (
    "Random weights: speed only, no quality claim. Routers repeat a recorded trace; "
    "tokens are known beforehand. Beside transformers ours begins the next step before "
    "it reads a token, as generate does; the peer waits for each."
)
STUDY = speed_study(
    "traced",
    "What does offloading cost a step on the real link, where routing repeats a "
    "recorded trace?",
    traced_rows,
    lambda settings, work_dir: [
        (name, config_from_hf(config))
        for name, config in models(settings.shapes).items()
    ],
    settings=TracedSettings,
    check=trace_path,
    limit=LIMIT,
    answer=answer_of,
)
