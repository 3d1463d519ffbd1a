"""Suite `large`: decode and prefill at the real size of OLMoE-1B-7B, 13.8 GB.

Two such models do not fit a small machine's memory side by side, so ours and llama.cpp
run in processes of their own, in turn, each from its own files.
"""

import functools
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import Rows, SuiteSettings, make_row, speed_study
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.rules import hf_shapes
from moe_edge.core.checks import CapacityError
from moe_edge.core.process import alone
from moe_edge.engine.load import load_engine
from moe_edge.metrics.machine import ram_bytes
from moe_edge.studies.speed.decode import (
    PROMPT_TOKENS,
    add_limit,
    bytes_per_step,
    decode_rate,
    memory_bandwidth,
    prefill_rate,
)
from moe_edge.studies.speed.llama_cpp import LlamaCpp, write_gguf
from moe_edge.studies.speed.models import olmoe_config, write_random
from moe_edge.studies.speed.peers import installed

NAME, KIND = "olmoe_7b_bfloat16", "BF16"
GGUF = f"{NAME}_{KIND}_gguf"
SHAPE = olmoe_config(16, "bfloat16", hidden=2048, heads=16) | {"vocab_size": 50304}
STEPS, PROMPT = 24, 512
CALLS = 3  # of which a process gives the median, after one that is not timed
SPAN = 1 << 31  # bytes that the bandwidth is measured over: beyond any cache


class Measured(NamedTuple):
    """Of one process: tokens a second, and bytes that a step reads."""

    decode: float
    prefill: float
    step_bytes: float = 0.0
    build: str = ""


def large_rows(settings: SuiteSettings, work_dir: Path) -> Rows:
    """Decode at batch 1 and prefill of 512 tokens, tokens per second.

    Raises:
      CapacityError: too little memory for the model, or disk for its two files.
    """
    has_peer = installed("llama_cpp", "gguf")
    check_machine(work_dir, (NAME, GGUF) if has_peer else (NAME,))
    folder = write_random(work_dir / NAME, SHAPE)
    cases = {"ours": functools.partial(alone, _ours, folder)}
    if has_peer:
        # In a process of its own, too: it holds the whole model.
        file = alone(write_gguf, folder, work_dir / GGUF, KIND)
        cases["llama.cpp"] = functools.partial(alone, _llama_cpp, file)
    bandwidth = memory_bandwidth(SPAN)
    found = interleave(cases, settings.repeats)
    rows = []
    for name, case in (("decode", "decode/{}/batch1"), ("prefill", "prefill/{}/512")):
        figures = {who: [getattr(m, name) for m in found[who]] for who in cases}
        peer = {}
        if "llama.cpp" in cases:
            peer = {
                "peer": figures["llama.cpp"],
                "peer_name": f"llama.cpp {KIND}",
                "peer_build": found["llama.cpp"][0].build,
            }
        rows.append(make_row(case.format(NAME), figures["ours"], "tokens/s", **peer))
    add_limit(rows[0], 1, found["ours"][0].step_bytes, bandwidth)
    return rows


def check_machine(work_dir: Path, folders: Sequence[str]) -> None:
    """Raises CapacityError where the model has no room in memory, or those of these
    folders that are to be made in work_dir, which exists, have none on its disk."""
    shapes = hf_shapes(config_from_hf(SHAPE)).values()
    num_bytes = 2 * sum(map(math.prod, shapes))
    wanted = [folder for folder in folders if not (work_dir / folder).exists()]
    for what, needed, got in (
        ("memory", 1.4 * num_bytes, ram_bytes() or math.inf),
        ("disk", len(wanted) * num_bytes, shutil.disk_usage(work_dir).free),
    ):
        if got < needed:
            raise CapacityError(
                f"suite large: its model takes {needed / 1e9:.1f} GB of {what}, here "
                f"are {got / 1e9:.1f} GB; use a larger machine or another --work_dir"
            )


def _ours(folder: Path) -> Measured:
    engine = load_engine(folder, with_tokenizer=False).engine
    short, long = _prompts(engine.config.vocab_size)
    return Measured(
        _median(lambda: decode_rate(engine, short, STEPS)),
        _median(lambda: prefill_rate(engine, long)),
        bytes_per_step(engine, short, steps=1),
    )


def _llama_cpp(file: Path) -> Measured:
    model = LlamaCpp(file, KIND, most_rows=1, most_tokens=PROMPT + STEPS)
    short, long = _prompts(model.vocabulary)
    return Measured(
        _median(lambda: model.rate("cpu", short, STEPS)),
        _median(lambda: model.rate("cpu", long)),
        build=model.build,
    )


def _prompts(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """A short and a long prompt [1, S]."""
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, vocabulary, (1, S)) for S in (PROMPT_TOKENS, PROMPT))


def _median(rate) -> float:
    rate()
    return statistics.median(rate() for _ in range(CALLS))


def _models_of(settings: SuiteSettings, work_dir: Path) -> list:
    return [(NAME, work_dir / NAME)]


STUDY = speed_study(
    "large",
    "How many tokens a second at the real size of OLMoE-1B-7B, compared with llama.cpp "
    "and what memory allows?",
    large_rows,
    _models_of,
)
