"""Quantised experts by our kernels (MOE_EDGE_PACKED=1), by XLA, and in bfloat16.

Asks how a layer's time compares with its bytes, and for prompts with its operations: 16
layers of OLMoE-1B-7B's size, random codes, 6 experts a token, 1 and 8 tokens by the
kernel for few rows, 64 and 512 by the matrix units. Sums of up to 8 tokens are compared
with NumPy's float64, and rows of a batch of 8 with the same rows alone.
"""

import functools
import os
import time

import common
import jax
import ml_dtypes
import numpy as np

from moe_edge.kernels import eights, native
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout

ON_GPU = jax.default_backend() == "gpu"
WIDTH, NEURONS, EXPERTS, TOP_K = (2048, 1024, 64, 6) if ON_GPU else (128, 128, 8, 2)
STEPS = 16 if ON_GPU else 2
KINDS = (None, "q4_0x8", "q8_0x8", "mxfp4x8", "fp8x8")  # None: bfloat16
LEAST = 2  # layers of XLA's form, which takes long
TOKENS = (1, 8, 64, 512) if ON_GPU else (1, 8, 64)
CHECKED = 8  # tokens, by NumPy


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report = common.Report("packed", given.out_dir)
    report.add("layers", given.layers)
    for kind in KINDS:
        layout = RecordLayout(WIDTH, NEURONS, kind=kind)
        layers = [_records(layout, seed) for seed in range(given.layers)]
        for tokens in TOKENS:
            with report.attempt(f"{kind}, {tokens} tokens"):
                _measure(report, layout, layers, tokens, given.rounds)


def _measure(report, layout: RecordLayout, layers, tokens: int, rounds: int) -> None:
    name = f"{layout.kind or 'bfloat16'}, {tokens} tokens"
    rng = np.random.default_rng(tokens)
    x_TD = rng.standard_normal((tokens, WIDTH), np.float32)
    ids_TK = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]
    given = x_TD, np.array(ids_TK, np.int32), np.full((tokens, TOP_K), 0.2, np.float32)
    given = jax.device_put(given)
    ways = ("kernel", "XLA") if layout.kind is not None else ("kernel",)
    calls = {way: _call(layout, layers, given, way) for way in ways}
    times = common.in_turn({way: call for way, (call, _) in calls.items()}, rounds)
    experts = len(np.unique(np.asarray(given[1])))
    size = layout.size * (1 if layout.kind is not None else 2)
    report.add(
        f"{name}, us a layer", {k: [1e3 * ms for ms in v] for k, v in times.items()}
    )
    report.add(f"{name}, bytes a layer", experts * size)
    operations = 6 * WIDTH * NEURONS * TOP_K * tokens
    report.add(f"{name}, operations a layer", operations)
    run, few = calls["kernel"][1], [each[:CHECKED] for each in given]
    want_TD = _by_numpy(layout, layers[0], few)
    y_TD = np.asarray(run(layers[0], *given))
    off = np.abs(y_TD[:CHECKED] - want_TD).max() / want_TD.std()
    report.add(f"{name}, off NumPy", off)
    if tokens <= CHECKED:
        alone_TD = [
            run(layers[0], *(each[t : t + 1] for each in given)) for t in range(tokens)
        ]
        is_same = np.array_equal(np.concatenate(alone_TD), y_TD)
        report.add(f"{name}, bits alone", is_same)
    report.add(f"{name}, profile", common.profile(calls["kernel"][0], STEPS, top=4))


def _records(layout: RecordLayout, seed: int) -> jax.Array:
    """Random records; scales of blocks are all alike and small."""
    rng = np.random.default_rng(seed)
    if layout.kind is None:
        values = rng.standard_normal((EXPERTS, layout.size), np.float32)
        return jax.device_put((0.02 * values).astype(ml_dtypes.bfloat16))
    records_ER = rng.integers(0, 256, (EXPERTS, layout.size), np.uint8)
    form = eights.FORMATS[layout.kind]
    blocks = records_ER.reshape(EXPERTS, -1, 4 * form.words)
    scale = {
        1: np.full(1, 117, np.uint8),
        2: np.full(1, 0.001, np.float16),
        4: np.full(1, 0.001, np.float32),
    }[form.scale_bytes]
    blocks[..., : 4 * form.scale_words] = np.tile(scale.view(np.uint8), 8)
    codes = blocks[..., 4 * form.scale_words :]
    if layout.kind == "fp8x8":  # which has codes of NaN
        codes &= 0xBF
    return jax.device_put(records_ER)


def _call(layout: RecordLayout, layers, given, way: str):
    """(a call that gives mean milliseconds of a layer; a layer's program)."""
    os.environ[eights.VARIABLE] = "1" if way == "kernel" else "0"  # read in compilation
    some = layers if way == "kernel" else layers[:LEAST]
    run = functools.partial(run_experts, layout=layout)

    @jax.jit
    @native.within
    def whole(layers, x_TD, ids_TK, weights_TK):
        for records_ER in layers:
            x_TD = x_TD + run(x_TD, ids_TK, weights_TK, records_ER)
        return x_TD

    def timed() -> float:
        begun_s = time.perf_counter()
        for _ in range(STEPS):
            whole(some, *given).block_until_ready()
        return common.MS * (time.perf_counter() - begun_s) / STEPS / len(some)

    one = jax.jit(native.within(lambda records, *given: run(*given, records)))
    timed()
    one(layers[0], *given)
    return timed, one


def _by_numpy(layout: RecordLayout, records_ER, given) -> np.ndarray:
    x_TD, ids_TK, weights_TK = map(np.asarray, given)
    records_ER, y_TD = np.asarray(records_ER), np.zeros(x_TD.shape)
    for t, k in np.ndindex(ids_TK.shape):
        part = functools.partial(layout.part, records_ER[ids_TK[t, k]])
        gate_F, up_F = (
            part(name).astype(np.float64) @ x_TD[t] for name in ("gate", "up")
        )
        mid_F = gate_F / (1 + np.exp(-gate_F)) * up_F
        y_TD[t] += weights_TK[t, k] * (part("down").astype(np.float64) @ mid_F)
    return y_TD


if __name__ == "__main__":
    main()
