"""Engines of several devices compile for several GPUs; what their programs send."""

import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from moe_edge.engine.mesh import DeviceMesh
from moe_edge.engine.sharded import ShardedPrograms
from moe_edge.engine.sharded_experts import ShardedExperts
from moe_edge.engine.weights import load_weights
from moe_edge.model import kv_cache
from tests.support.gpu_kernels import as_on_a_gpu
from tests.support.sharded import ONE_LAYER, collectives
from tests.support.tiny_models import RandomReader

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import compile_for, described

pytestmark = pytest.mark.cuda
DEVICES, ROWS, TOKENS, CAPACITY = 4, 3, 40, 64
D, E, K = ONE_LAYER.d_model, ONE_LAYER.moe.num_experts, ONE_LAYER.moe.top_k
TRITON = "__gpu$xla.gpu.triton"


@pytest.fixture(scope="module")
def programs():
    """Programs on four described GPUs, and shapes of arrays there: of weights, of
    experts, and a function that makes others."""
    mesh = DeviceMesh.of(described(DEVICES))

    def shape(dims, dtype=jnp.int32, sharding=mesh.whole):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    with as_on_a_gpu():
        weights = load_weights(RandomReader(ONE_LAYER, dtype=ml_dtypes.bfloat16))
        (records_ER,) = weights.experts
        slots, size = DEVICES * -(-E // DEVICES), records_ER.shape[1]
        experts = ShardedExperts(
            shape((slots, size), records_ER.dtype, mesh.parted),
            shape((DEVICES, E), sharding=mesh.parted),
        )
        dense = jax.tree.map(
            lambda array: shape(array.shape, array.dtype), (weights.top, weights.layers)
        )
        yield ShardedPrograms(ONE_LAYER, mesh), *dense, (experts,), shape


def caches(shape, rows: int):
    attention = ONE_LAYER.attention_of(0)
    arrays = kv_cache.cache_arrays(attention, rows, CAPACITY)
    return [{name: shape(each.shape, each.dtype) for name, each in arrays.items()}]


def test_a_step_sends_the_rows_of_its_pairs(programs):
    made, top, layers, experts, shape = programs
    tokens = shape((ROWS,)), shape((ROWS,)), shape((ROWS,), bool)
    given = top, layers, experts, [shape(())], tokens, shape((ROWS,))
    text = compile_for(made.decode, *given, caches(shape, ROWS))
    assert collectives(text) == [("all-reduce", ROWS * K * D)]
    assert text.count(TRITON) > 2


def test_a_prompt_sends_shares_of_rows_and_then_sums(programs):
    made, top, layers, experts, shape = programs
    tokens = shape((1, TOKENS)), shape((1,)), shape((1, TOKENS), bool)
    begun = jax.eval_shape(made.top.embed_step, top["embed"], *tokens)
    x_BSD, chunk = jax.tree.map(lambda each: shape(each.shape, each.dtype), begun)
    given = made.kinds, layers, experts, [shape(())], x_BSD, chunk
    text = compile_for(made.layers, *given, caches(shape, 1))
    share = TOKENS // DEVICES
    assert collectives(text) == [
        ("reduce-scatter", share * K * D),
        ("all-gather", TOKENS * D),
    ]
    assert text.count(TRITON) > 2
