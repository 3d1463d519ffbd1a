"""Suites `decode` and `prefill`: the resident engine beside `transformers`."""

import functools
import statistics

import jax
import numpy as np

from moe_edge.engine.load import load_engine
from moe_edge.studies.speed import engines, peers
from moe_edge.studies.speed.models import benchmark_models
from moe_edge.studies.speed.timing import interleave, memory_bandwidth, round_ratios

PROMPT_TOKENS = 32


def _prompts(engine, batch: int, tokens: int):
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, tokens))


def _row(case: str, figures: dict, unit: str, limit: float | None) -> dict:
    """One row of the table: ours, the best peer, the ratio round by round."""
    ours = statistics.median(figures["ours"])
    rest = {name: f for name, f in figures.items() if name != "ours"}
    row = {"case": case, "ours": ours, "peer": None, "unit": unit, "ratio": None}
    if rest:
        best = max(rest, key=lambda name: statistics.median(rest[name]))
        row["peer"] = statistics.median(rest[best])
        row["round_ratios"] = round_ratios(figures["ours"], rest[best])
        row["ratio"] = statistics.median(row["round_ratios"])
        row["peer_name"] = f"transformers float32 {best}"
        row["peers"] = {name: statistics.median(f) for name, f in rest.items()}
    row["limit_fraction"] = None if limit is None else ours / limit
    row["runs"] = figures
    return row


def _load(folder):
    """Our engine and the peer (or None) on one HF folder."""
    engine = load_engine(folder, with_tokenizer=False).engine
    return engine, peers.load_peer(str(folder))


def _cases(run_ours, run_peer) -> dict:
    """What is timed side by side: ours and, where there is a peer, its two paths."""
    cases = {"ours": run_ours}
    for implementation in peers.IMPLEMENTATIONS if run_peer else ():
        cases[implementation] = functools.partial(run_peer, implementation)
    return cases


def decode_suite(repeats: int, work_dir) -> list[dict]:
    """Decode tokens per second at batch 1 and 8."""
    # Host memory says nothing about a GPU's.
    bandwidth = memory_bandwidth() if jax.default_backend() == "cpu" else None
    rows = []
    for name, folder in benchmark_models(work_dir):
        engine, peer = _load(folder)
        for batch, steps in ((1, 24), (8, 8)):
            prompts = _prompts(engine, batch, PROMPT_TOKENS)
            ours = functools.partial(engines.decode, engine, prompts, steps)
            theirs = peer and functools.partial(
                peer.decode, prompts=prompts, steps=steps
            )
            figures = interleave(_cases(ours, theirs), repeats)
            step_bytes = engines.bytes_per_step(engine, prompts, steps)
            limit = bandwidth and batch * max(bandwidth.values()) / step_bytes
            row = _row(f"decode/{name}/batch{batch}", figures, "tokens/s", limit)
            row |= {"bytes_per_step": step_bytes, "bandwidth_bytes_per_s": bandwidth}
            rows.append(row)
    return rows


def prefill_suite(repeats: int, work_dir) -> list[dict]:
    """Prompt tokens per second for prompts of 128 and 512 tokens."""
    rows = []
    for name, folder in benchmark_models(work_dir):
        engine, peer = _load(folder)
        for tokens in (128, 512):
            prompts = _prompts(engine, 1, tokens)
            ours = functools.partial(engines.prefill, engine, prompts)
            theirs = peer and functools.partial(peer.prefill, prompts=prompts)
            figures = interleave(_cases(ours, theirs), repeats)
            rows.append(_row(f"prefill/{name}/{tokens}", figures, "tokens/s", None))
    return rows
