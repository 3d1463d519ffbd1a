"""Suite `forms`: the experts of a few layers by number of tokens, ours beside XLA's.

On a GPU in the shape of OLMoE-1B-7B, on a CPU in that of `olmoe_450m`; bfloat16. The
layers are one program and feed one another, so that launching it hardly counts and
weights come from memory.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.bench.rounds import interleave_seconds
from moe_edge.bench.speed import Rows, SuiteSettings, make_row, speed_study
from moe_edge.engine.weights import to_device
from moe_edge.kernels import native
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.offload.store import device_dtype
from moe_edge.studies.speed.rates import device_bandwidth

TOKENS = (1, 2, 4, 8, 16, 32, 128, 512)
EXPERTS, CHOSEN, LAYERS = 64, 8, 4
MICRO = 1e6


def forms_rows(settings: SuiteSettings, _work_dir) -> Rows:
    """Microseconds of a layer's experts.

    `limit_fraction` is the share of the time in which the chosen experts' weights can
    be read once.
    """
    on_gpu = jax.default_backend() == "gpu"
    layout = RecordLayout(2048, 1024) if on_gpu else RecordLayout(768, 384)
    rng, rate = np.random.default_rng(0), device_bandwidth()
    dtype = np.dtype(jnp.bfloat16)
    layers = [_records(rng, layout, dtype) for _ in range(LAYERS)]
    run = functools.partial(_run, layout=layout)
    programs = {"ours": jax.jit(native.within(run)), "XLA": jax.jit(run)}
    rows = []
    for tokens in TOKENS:
        x_TD = jnp.asarray(rng.normal(size=(tokens, layout.d_model)), jnp.float32)
        ids_LTK = np.array(
            [
                [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)]
                for _ in layers
            ],
            np.int32,
        )
        given = x_TD, jnp.asarray(ids_LTK), layers
        cases = {
            name: functools.partial(_ready, program, given)
            for name, program in programs.items()
        }
        found = interleave_seconds(cases, settings.repeats)
        ours, theirs = (
            [MICRO * seconds / LAYERS for seconds in found[name]] for name in programs
        )
        distinct = sum(len(np.unique(ids_TK)) for ids_TK in ids_LTK) / LAYERS
        read_us = MICRO * distinct * layout.num_bytes(device_dtype(dtype)) / rate
        row = make_row(
            f"forms/{tokens}", ours, "us", peer=theirs, peer_name="XLA's loops"
        )
        share = read_us / statistics.median(ours)
        rows.append(row | {"limit_fraction": share, "bandwidth_bytes_per_s": rate})
    return rows


def _records(rng, layout: RecordLayout, dtype) -> jax.Array:
    values = 0.02 * rng.standard_normal((EXPERTS, layout.size), np.float32)
    return to_device(values.astype(dtype))


def _run(x_TD, ids_LTK, layers, layout: RecordLayout):
    weights_TK = jnp.full(ids_LTK.shape[1:], 1 / CHOSEN, jnp.float32)
    for layer, experts_ER in enumerate(layers):
        x_TD = x_TD + run_experts(x_TD, ids_LTK[layer], weights_TK, experts_ER, layout)
    return x_TD


def _ready(program, given) -> None:
    program(*given).block_until_ready()


STUDY = speed_study(
    "forms",
    "How long do a layer's experts take by number of tokens, beside XLA's loops and "
    "the reading of their weights?",
    forms_rows,
    limit="Random weights and a random choice: each token takes other experts.",
)
