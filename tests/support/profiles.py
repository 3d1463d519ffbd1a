"""Profiles of tiny checkpoints, and what their engines give the experts."""

from pathlib import Path

import jax.experimental
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.profile.calibration import parse_files, read_calibration
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_checkpoints import random_tensors, raw_config
from tests.support.tiny_checkpoints import write_folder as write_zoo

WINDOW = 16


def zoo_folder(path, family, **changes):
    raw = raw_config(family, vocab_size=320, **changes)
    tensors = random_tensors(raw, raw["torch_dtype"])
    # Moderate weights: rounding, not chaos, separates two ways of computing.
    small = {
        n: a if a.ndim == 1 else (a.astype(np.float32) * 0.15).astype(a.dtype)
        for n, a in tensors.items()
    }
    write_zoo(path, raw, small)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path, small, raw


def profile(out_dir, checkpoint, text, **given):
    options = {"window": WINDOW, "batch_size": 3} | given
    summary = run_profile(
        out_dir=str(out_dir), checkpoint=str(checkpoint), text=text, **options
    )
    assert set(summary) == {"tokens", "out_dir"}
    return open_profile(out_dir)


def calibration_of(checkpoint, text):
    tokenizer = tiny_tokenizer()

    class Ids:
        def encode(self, text, end=True):
            return tokenizer.encode(text).ids

    return read_calibration(parse_files(text), Ids(), WINDOW, None)


def numpy_act(gate, up, moe):
    if moe.activation == "clamped_swiglu":
        gate = np.minimum(gate, moe.swiglu_limit)
        up = np.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    if moe.activation == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    assert moe.activation == "silu"
    return gate / (1 + np.exp(-gate)) * up


def capture(checkpoint, calibration):
    """(reader, layer -> (hidden, ids, weights) of all tokens), from an engine."""
    reader = open_checkpoint(checkpoint)
    engine = ResidentEngine(load_weights(reader))
    run, calls = engine.programs.run_experts, []

    def record(*arrays):
        calls.append([np.asarray(array) for array in arrays])

    def run_and_record(hidden, ids, weights, records):
        jax.experimental.io_callback(record, None, hidden, ids, weights, ordered=True)
        return run(hidden, ids, weights, records, method="dense")

    engine.programs.run_experts = run_and_record
    rows = rows_of(calibration)
    chunks = [np.asarray(logits).shape[1] for _, logits in engine.score(rows)]
    assert len(chunks) == 1 and len(calls) == len(reader.config.moe_layers)
    seen = {}
    for layer, (hidden, ids, weights) in zip(
        reader.config.moe_layers, calls, strict=True
    ):
        real = ids[:, 0] < reader.config.moe.num_experts
        seen[layer] = hidden[real], ids[real], weights[real]
    return reader, seen


def rows_of(calibration, domain=None):
    """Token lists of the windows, of all domains or of one."""
    return [
        calibration.tokens_NW[n][valid].tolist()
        for n, valid in enumerate(calibration.valid_NW)
        if domain is None or calibration.domain_N[n] == domain
    ]


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
