"""Suites `decode` and `prefill`: the resident engine compared with `transformers`."""

import functools
import statistics
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from moe_edge.engine.load import load_engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.metrics.machine import cpu_cores
from moe_edge.studies.rounds import interleave
from moe_edge.studies.speed import peers
from moe_edge.studies.speed.models import benchmark_models
from moe_edge.studies.speed.runs import argmax, decode_run, random_prompts
from moe_edge.studies.speed.suite import Rows, SuiteSettings, make_row, speed_study

PROMPT_TOKENS = 32


def decode_rows(settings: SuiteSettings, work_dir) -> Rows:
    """Decode tokens per second at batch 1 and 8."""
    # Host memory says nothing about a GPU's.
    bandwidth = memory_bandwidth() if jax.default_backend() == "cpu" else None
    rows = []
    for name, engine, peer in _loaded(work_dir):
        for batch, steps in ((1, 24), (8, 8)):
            prompts = random_prompts(engine, batch, PROMPT_TOKENS)
            figures = _in_turn(
                settings.repeats,
                functools.partial(decode_rate, engine, prompts, steps),
                peer and functools.partial(peer.decode, prompts=prompts, steps=steps),
            )
            step_bytes = bytes_per_step(engine, prompts, steps)
            limit = bandwidth and batch * max(bandwidth.values()) / step_bytes
            extra = {"bytes_per_step": step_bytes, "bandwidth_bytes_per_s": bandwidth}
            rows.append(_row(f"decode/{name}/batch{batch}", figures, limit, **extra))
    return rows


def prefill_rows(settings: SuiteSettings, work_dir) -> Rows:
    """Prompt tokens per second for prompts of 128 and 512 tokens."""
    rows = []
    for name, engine, peer in _loaded(work_dir):
        for tokens in (128, 512):
            prompts = random_prompts(engine, 1, tokens)
            figures = _in_turn(
                settings.repeats,
                functools.partial(prefill_rate, engine, prompts),
                peer and functools.partial(peer.prefill, prompts=prompts),
            )
            rows.append(_row(f"prefill/{name}/{tokens}", figures, None))
    return rows


def _loaded(work_dir):
    """Name, our engine and the peer (or None) of each model."""
    for name, folder in benchmark_models(work_dir):
        engine = load_engine(folder, with_tokenizer=False).engine
        yield name, engine, peers.load_peer(str(folder))


def _in_turn(repeats: int, ours: Callable, peer: Callable | None) -> dict:
    """Figures of ours and, where there is a peer, of its two paths."""
    cases = {"ours": ours}
    for implementation in peers.IMPLEMENTATIONS if peer else ():
        cases[implementation] = functools.partial(peer, implementation)
    return interleave(cases, repeats)


def _row(case: str, figures: dict, limit: float | None, **extra) -> dict:
    """Ours against the better path of the peer.

    Args:
      case: what was measured.
      figures: a list a path, one figure a round.
      limit: tokens per second that memory allows, where that is known.
      **extra: see `make_row`.
    """
    medians = {name: statistics.median(runs) for name, runs in figures.items()}
    del medians["ours"]
    best = max(medians, key=medians.get, default=None)
    row = make_row(
        case,
        figures["ours"],
        "tokens/s",
        peer=None if best is None else figures[best],
        peer_name=f"transformers float32 {best}",
        peers=medians,
        **extra,
    )
    fraction = None if limit is None else row["ours"] / limit
    return row | {"runs": figures, "limit_fraction": fraction}


def decode_rate(engine: ResidentEngine, prompts, steps: int) -> float:
    """Greedy tokens per second of `steps` steps after the (untimed) prompts.

    Args:
      engine: loaded model.
      prompts: int array [B, S].
      steps: decode steps; the host reads every token, as a user does.
    """
    run = decode_run(engine, prompts, steps)
    return steps * len(prompts) / run.step_s.sum()


def prefill_rate(engine: ResidentEngine, prompts) -> float:
    """Prompt tokens per second up to the logits after the last token."""
    session = engine.new_session(*np.shape(prompts))
    started = time.perf_counter()
    np.asarray(argmax(engine.prefill(session, prompts)))
    return np.size(prompts) / (time.perf_counter() - started)


def bytes_per_step(engine: ResidentEngine, prompts, steps: int) -> float:
    """Mean stored bytes of weights that a decode step has to read.

    All dense weights but the embedding table (a step reads B of its rows, unless it
    is the head too), and each *distinct* expert of a step once; counted in an
    untimed run. Cache reads are not included.
    """
    weights, config = engine.weights, engine.config
    dense = sum(array.nbytes for array in jax.tree.leaves(weights.layers))
    head = weights.top["embed" if config.tie_embeddings else "head"].nbytes
    record = next(e for e in weights.experts if e is not None)
    distinct = []

    def count(layer, routing):
        distinct.append(len(np.unique(np.asarray(routing.ids_TK))))

    decode_run(engine, prompts, steps, on_routing=count)
    experts = sum(distinct) / steps * record.nbytes / config.moe.num_experts
    return dense + head + experts


def memory_bandwidth(num_bytes: int = 1 << 28, repeats: int = 5) -> dict[str, float]:
    """Bytes per second of a large copy and of a large read, the best of `repeats`.

    Decoding only reads, so the larger of both is its limit; a copy alone, with its
    writes, can come out below what a reading program reaches.

    Args:
      num_bytes: size of the array, well above the last-level cache.
    Returns:
      {"copy": reads and writes both counted, "read": ...}.
    """
    threads = cpu_cores()
    num_bytes -= num_bytes % (8 * threads)
    source = np.ones(num_bytes // 8, np.int64)
    target = np.zeros_like(source)
    parts = np.split(source, threads), np.split(target, threads)
    copy = [
        functools.partial(np.copyto, to, part) for part, to in zip(*parts, strict=True)
    ]
    read = [functools.partial(np.bitwise_or.reduce, part) for part in parts[0]]
    return {
        "copy": 2 * num_bytes / _all_at_once(copy, repeats),
        "read": num_bytes / _all_at_once(read, repeats),
    }


def _all_at_once(jobs: list[Callable[[], object]], repeats: int) -> float:
    """Best seconds of running the jobs, a thread each."""
    best = float("inf")
    for _ in range(repeats):
        workers = [threading.Thread(target=job) for job in jobs]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - started)
    return best


STUDIES = {
    f"benchmark_{name}": speed_study(
        name, question, rows, lambda _, folder: benchmark_models(folder)
    )
    for name, question, rows in (
        (
            "decode",
            "How many tokens a second does the resident engine decode, compared with "
            "transformers and with what memory allows?",
            decode_rows,
        ),
        (
            "prefill",
            "How many prompt tokens a second does the resident engine take in, "
            "compared with transformers?",
            prefill_rows,
        ),
    )
}
