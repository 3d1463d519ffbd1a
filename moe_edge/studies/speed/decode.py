"""Suites `decode` and `prefill`: the resident engine compared with peers."""

import functools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import Rows, SuiteSettings, make_row, speed_study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.process import cpu_cores
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights
from moe_edge.studies.speed import peers
from moe_edge.studies.speed.models import BenchmarkModel, benchmark_models
from moe_edge.studies.speed.runs import decode_run, greedy, random_prompts

PROMPT_TOKENS = 32


def decode_rows(settings: SuiteSettings, work_dir) -> Rows:
    """Decode tokens per second at batch 1 and 8."""
    # Host memory says nothing about a GPU's.
    bandwidth = memory_bandwidth() if jax.default_backend() == "cpu" else None
    rows = []
    for model, engine, found in _loaded(benchmark_models(work_dir), work_dir):
        for batch, steps in ((1, 48), (8, 16)):
            prompts = random_prompts(engine, batch, PROMPT_TOKENS)
            ours = functools.partial(decode_rate, engine, prompts, steps)
            case = f"decode/{model.name}/batch{batch}"
            beside = rows_beside(case, settings.repeats, ours, found, prompts, steps)
            step_bytes = bytes_per_step(engine, prompts, steps)
            add_limit(beside[0], batch, step_bytes, bandwidth)
            rows += [row | _held(model, engine) for row in beside]
    return rows


def add_limit(row: dict, batch: int, step_bytes: float, bandwidth) -> None:
    """Adds to a row of decoding its share of what reading the weights allows.

    Args:
      step_bytes: what a step reads (`bytes_per_step`).
      bandwidth: as `memory_bandwidth` gives it; None: not known.
    """
    row |= {"bytes_per_step": step_bytes, "bandwidth_bytes_per_s": bandwidth}
    if bandwidth:
        limit = batch * max(bandwidth.values()) / step_bytes
        row["limit_fraction"] = row["ours"] / limit


def prefill_rows(settings: SuiteSettings, work_dir) -> Rows:
    """Prompt tokens per second for prompts of 128 and 512 tokens."""
    rows = []
    # Prompts meet weights with exact activations in any case.
    models = [m for m in benchmark_models(work_dir) if m.activations == "float32"]
    for model, engine, found in _loaded(models, work_dir):
        for tokens in (128, 512):
            prompts = random_prompts(engine, 1, tokens)
            ours = functools.partial(prefill_rate, engine, prompts)
            case = f"prefill/{model.name}/{tokens}"
            beside = rows_beside(case, settings.repeats, ours, found, prompts)
            rows += [row | _held(model, engine) for row in beside]
    return rows


def _loaded(models: Sequence[BenchmarkModel], work_dir):
    """Each model, our engine and the peers that are installed."""
    for model in models:
        given = {"with_tokenizer": False, "activations": model.activations}
        engine = load_engine(model.folder, **given).engine
        found = peers.load_peers(model.hf_folder, work_dir, model.kind, model.dense)
        yield model, engine, found


def _held(model: BenchmarkModel, engine: ResidentEngine) -> dict[str, str]:
    """How a row's weights, its other state and what it computes are held.

    llama.cpp rounds activations to 8 bits wherever weights are quantised.
    """
    stored = open_checkpoint(model.hf_folder).dtype.name
    peer = "float32" if model.kind is None else "int8"
    return {
        "experts": model.kind or stored,
        "dense": model.dense or stored,
        "activations": model.activations,
        "cache": engine.config.cache_type,
        "peer_activations": peer,
        "peer_cache": "float16",  # of llama.cpp
    }


def rows_beside(case: str, repeats: int, ours: Callable, found: Sequence, *run) -> Rows:
    """Ours against each peer's better way, a row each, all measured in turn.

    Args:
      found: the peers; without any there is one row.
      run: prompts and steps, as `Transformers.rate` takes them.
    """
    cases = {"ours": ours}
    for peer in found:
        for way in peer.ways:
            cases[peer.name, way] = functools.partial(peer.rate, way, *run)
    figures = interleave(cases, repeats)
    rows = []
    for peer in found:
        medians = {way: statistics.median(figures[peer.name, way]) for way in peer.ways}
        best = max(medians, key=medians.get)
        row = make_row(
            # A case is named once: of the second peer's it says whose.
            *(f"{case} beside {peer.name}" if rows else case, figures["ours"]),
            "tokens/s",
            peer=figures[peer.name, best],
            peer_name=f"{peer.name} {best}",
        )
        rows.append(row | {"ways": medians, "peer_build": peer.build})
    return rows or [make_row(case, figures["ours"], "tokens/s")]


def decode_rate(engine: ResidentEngine, prompts, steps: int) -> float:
    """Greedy tokens per second of `steps` steps after the (untimed) prompts [B, S].

    As `moe-edge generate` decodes: each token reaches its reader, beside the next step
    where the engine runs ahead.
    """
    done = generate(engine, np.asarray(prompts).tolist(), steps + 1)
    return done.steps * len(prompts) / done.decode_s


def prefill_rate(engine: ResidentEngine, prompts) -> float:
    """Prompt tokens per second up to the logits after the last token."""
    session = engine.new_session(*np.shape(prompts))
    run = functools.partial(engine.prefill, session, prompts)
    return np.size(prompts) / seconds_of(lambda: np.asarray(greedy(run())))


def bytes_per_step(engine: ResidentEngine, prompts, steps: int) -> float:
    """Mean stored bytes of weights that a decode step has to read.

    All dense weights but the embedding table (a step reads B of its rows, unless it
    is the head too), and each *distinct* expert of a step once; counted in an
    untimed run. Cache reads are not included.
    """
    distinct = []

    def count(layer, routing):
        distinct.append(len(np.unique(np.asarray(routing.ids_TK))))

    decode_run(engine, prompts, steps, on_routing=count)
    return weight_bytes(engine.weights, sum(distinct) / steps)


def weight_bytes(weights: Weights, experts: float) -> float:
    """Stored bytes of all dense weights but the embedding table (unless it is the head
    too), and of so many experts."""
    head = weights.top["embed" if weights.config.tie_embeddings else "head"]
    dense = sum(array.nbytes for array in jax.tree.leaves(weights.layers))
    records = next(each for each in weights.experts if each is not None)
    return dense + head.nbytes + experts * records.nbytes / len(records)


def memory_bandwidth(num_bytes: int = 1 << 28, repeats: int = 5) -> dict[str, float]:
    """Bytes per second of a large copy (reads and writes both counted) and of a large
    read, the best of `repeats`; the array is well above the last-level cache.

    Decoding only reads, so the larger of both is its limit; a copy alone, with its
    writes, can come out below what a reading program reaches.
    """
    threads = cpu_cores()
    num_bytes -= num_bytes % (8 * threads)
    source = np.split(np.ones(num_bytes // 8, np.int64), threads)
    copy = [functools.partial(np.copyto, np.zeros_like(part), part) for part in source]
    read = [functools.partial(np.bitwise_or.reduce, part) for part in source]
    return {
        "copy": 2 * num_bytes / _all_at_once(copy, repeats),
        "read": num_bytes / _all_at_once(read, repeats),
    }


def _all_at_once(jobs: list[Callable[[], object]], repeats: int) -> float:
    """Best seconds of running the jobs, a thread each."""
    with ThreadPoolExecutor(len(jobs)) as pool:

        def run():
            list(pool.map(lambda job: job(), jobs))

        return min(seconds_of(run) for _ in range(repeats))


def _models_of(settings: SuiteSettings, work_dir) -> list:
    return [(model.name, model.folder) for model in benchmark_models(work_dir)]


STUDIES = {
    f"benchmark_{name}": speed_study(name, question, rows, _models_of)
    for name, question, rows in (
        (
            "decode",
            "How many tokens a second does the resident engine decode, compared with "
            "transformers, llama.cpp and what memory allows?",
            decode_rows,
        ),
        (
            "prefill",
            "How many prompt tokens a second does the resident engine take in, "
            "compared with transformers and llama.cpp?",
            prefill_rows,
        ),
    )
}
