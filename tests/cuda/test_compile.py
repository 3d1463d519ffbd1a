"""Programs of the engines compile for a GPU; how many kernels a layer launches."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine, ResidentPrograms
from moe_edge.kernels import decode_attention, native
from moe_edge.model.config import ACTIVATIONS
from moe_edge.model.experts import run_experts
from moe_edge.model.kv_cache import empty_caches
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import layer_shapes
from moe_edge.model.transformer import make_chunk
from moe_edge.studies.speed.models import olmoe_config
from tests.support.layered import BLOCKS, StoreReader, forced_logits
from tests.support.tiny_models import ALL, random_prompts, random_weights

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import Call, compile_all, launches, programs_of

pytestmark = pytest.mark.cuda
LENGTHS = (20, 3, 33)  # a prefill by the kernel's larger blocks, then single tokens
TRITON = "__gpu$xla.gpu.triton"
EXPERTS = "moe_edge_grouped/pallas_call"
# Kernels of a layer at batch 1 in the shape of OLMoE-1B-7B. Each costs some 5 us there.
MOST_LAUNCHES = {"0": 18, "1": 12}  # by MOE_EDGE_DECODE_ATTENTION
TOKENS = (1, 5, 40, 400)


@pytest.mark.parametrize("name", ALL)
def test_resident(name):
    def run():
        engine = ResidentEngine(random_weights(ALL[name], dtype=ml_dtypes.bfloat16))
        forced_logits(engine, random_prompts(ALL[name], LENGTHS), 2)

    texts = compile_all(programs_of(run))
    is_here = any(EXPERTS in text for text in texts)
    assert is_here == (ALL[name].moe.expert_kind is None)


@pytest.mark.parametrize("mode", ["layered", "fused"])
@pytest.mark.parametrize("name", ["gqa", "mla", "gpt_oss", "q8_0"])
def test_offloaded(name, mode):
    def run():
        # Fewer slots than a prompt's experts: waves.
        options = OffloadOptions(device_memory=f"{100 * 6 / BLOCKS}%", mode=mode)
        reader = StoreReader(ALL[name], dtype=ml_dtypes.bfloat16)
        with make_offloaded(reader, options) as engine:
            forced_logits(engine, random_prompts(ALL[name], LENGTHS), 2)

    texts = compile_all(programs_of(run))
    in_host_memory = "S(5)"
    assert any(in_host_memory in text for text in texts) == (mode == "fused")


@pytest.mark.parametrize(
    "activation, parts", [*((each, None) for each in ACTIVATIONS), ("silu", "3")]
)
def test_experts(activation, parts, monkeypatch):
    if parts is not None:
        monkeypatch.setenv("MOE_EDGE_PARTS", parts)
    layout, shape = RecordLayout(64, 128), jax.ShapeDtypeStruct
    limit = 7.0 if activation == "clamped_swiglu" else None
    options = {"activation": activation, "swiglu_limit": limit}
    run = functools.partial(run_experts, layout=layout, **options)
    calls = []
    for tokens, dtype in itertools.product(TOKENS, (jnp.float32, jnp.bfloat16)):
        pairs = tokens, 3
        args = shape((tokens, 64), jnp.float32), shape(pairs, jnp.int32)
        args += shape(pairs, jnp.float32), shape((9, layout.size), dtype)
        calls.append(Call(native.within(run), {}, args, {}))
    for text in compile_all(calls):
        assert sum(TRITON in launch for launch in launches(text)) == 2


@pytest.mark.parametrize("one_kernel", MOST_LAUNCHES)
def test_launches_of_a_layer(one_kernel, monkeypatch):
    monkeypatch.setenv(decode_attention.VARIABLE, one_kernel)
    hf_config = olmoe_config(16, "bfloat16", hidden=2048, heads=16)
    config, layers = config_from_hf(hf_config), 2
    shape, size = jax.ShapeDtypeStruct, RecordLayout.of(config).size
    dense = {
        name: shape(dims, jnp.float32 if len(dims) == 1 else jnp.bfloat16)
        for name, dims in layer_shapes(config, 0).items()
    }
    experts = shape((config.moe.num_experts, size), jnp.bfloat16)
    start_B, valid_BS = shape((1,), jnp.int32), shape((1, 1), bool)
    chunk = jax.eval_shape(lambda *given: make_chunk(config, *given), start_B, valid_BS)
    caches = jax.eval_shape(lambda: empty_caches(config, 1, 512, layers))
    windows = layers * (shape((), jnp.int32),)
    x_BSD = shape((1, 1, config.d_model), jnp.float32)
    args = (layers * (dense,), layers * (experts,), windows, x_BSD, chunk, caches)
    step = native.within(ResidentPrograms(config)._layers_step)
    (text,) = compile_all([Call(step, {"donate_argnums": 5}, args, {})])
    found = launches(text)
    # Four norms, the choice, two products; padding is masked once for all layers. The
    # norms of q and k are the work of attention where that is a kernel.
    triton = 7 if one_kernel == "0" else 6
    assert sum(TRITON in launch for launch in found) == triton * layers
    if jax.__version_info__ < (0, 11):  # where it was counted
        assert len(found) <= MOST_LAUNCHES[one_kernel] * layers + 1, found
