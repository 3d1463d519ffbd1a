"""Programs of the engines compile for a GPU; how many kernels a layer launches."""

import dataclasses
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from moe_edge.convert.families import config_from_hf
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_zero_copy import ZeroCopy
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine, ResidentPrograms
from moe_edge.kernels import decode_attention, delta_state, few, native, switches
from moe_edge.model.config_checks import ACTIVATIONS
from moe_edge.model.delta_net import DeltaNet
from moe_edge.model.experts import run_experts
from moe_edge.model.kv_cache import empty_caches
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.model.shapes import layer_shapes
from moe_edge.model.state_config import DeltaConfig
from moe_edge.model.transformer import make_chunk
from moe_edge.offload import indexed_slots
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.store import host_sharding
from moe_edge.studies.speed.models import olmoe_config
from tests.support.gpu_kernels import as_on_a_gpu
from tests.support.layered import BLOCKS, StoreReader, forced_logits
from tests.support.tiny_models import ALL, random_prompts, random_weights

if importlib.util.find_spec("jax_cuda12_plugin") is None:
    pytest.skip("needs jax-cuda12-plugin, see CONTRIBUTING.md", allow_module_level=True)

from tests.support.gpu_compiler import (
    GPUS,
    Call,
    compile_all,
    launches,
    programs_of,
)

pytestmark = pytest.mark.cuda
HOST_MEMORY = "S(5)"
LENGTHS = (20, 3, 33)  # a prefill by the kernel's larger blocks, then single tokens
TRITON = "__gpu$xla.gpu.triton"
EXPERTS = "moe_edge_grouped/pallas_call"
# Kernels of a layer at batch 1 in the shape of OLMoE-1B-7B. Each costs some 5 us there.
MOST_LAUNCHES = {"0": 18, "1": 12}  # by MOE_EDGE_DECODE_ATTENTION
LOOK_UP, FEW = "moe_edge_look_up/pallas_call", "moe_edge_few/pallas_call"
FEW_CUDA = 'custom_call_target="moe_edge_few_product"'
TOKENS = (1, 5, 40, 400)


@pytest.mark.parametrize(
    "name, gpu", [*((name, "H200") for name in ALL), ("gqa", "RTX 4090")]
)
def test_resident(name, gpu):
    def run():
        engine = ResidentEngine(random_weights(ALL[name], dtype=ml_dtypes.bfloat16))
        forced_logits(engine, random_prompts(ALL[name], LENGTHS), 2)

    texts = compile_all(programs_of(run), GPUS[gpu])
    is_here = any(EXPERTS in text for text in texts)
    assert is_here == (ALL[name].moe.expert_kind is None)


@pytest.mark.parametrize("mode", ["layered", "fused"])
@pytest.mark.parametrize(
    "name, gpu",
    [
        *((name, "H200") for name in ("gqa", "mla", "gpt_oss", "q8_0")),
        ("gqa", "RTX 4090"),
    ],
)
def test_offloaded(name, gpu, mode):
    def run():
        # Fewer slots than a prompt's experts: waves.
        given = {"mode": mode, "slot_plan": "one_pool"}
        options = OffloadOptions(device_memory=f"{100 * 6 / BLOCKS}%", **given)
        reader = StoreReader(ALL[name], dtype=ml_dtypes.bfloat16)
        with make_offloaded(reader, options) as engine:
            forced_logits(engine, random_prompts(ALL[name], LENGTHS), 2)

    texts = compile_all(programs_of(run), GPUS[gpu])
    assert any(HOST_MEMORY in text for text in texts) == (mode == "fused")


@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("by_kernel", switches.OFF_ON)
def test_states_of_a_delta_net(by_kernel, tokens, monkeypatch):
    """One launch takes them through a step, or through a prompt's sub-chunks."""
    monkeypatch.setenv(delta_state.VARIABLE, by_kernel)
    shape, rows = jax.ShapeDtypeStruct, 2
    kind = DeltaConfig(
        key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4
    )
    model = dataclasses.replace(ALL["states"], other_attention=(kind, kind))

    def run(weights, x_BSD, valid_BS, cache):
        net = DeltaNet(model, 1, nnx.Rngs(0))
        for name, array in weights.items():
            getattr(net, name)[...] = array
        return net(x_BSD, valid_BS, cache)

    def arrays(shapes):
        return {name: shape(each, jnp.float32) for name, each in shapes.items()}

    weights = arrays(kind.weight_shapes(model.d_model))
    x_BSD = shape((rows, tokens, model.d_model), jnp.float32)
    cache = arrays(kind.state_shapes(rows))
    args = weights, x_BSD, shape((rows, tokens), bool), cache
    (text,) = compile_all([Call(native.within(run), {"donate_argnums": 3}, args, {})])
    name = "moe_edge_delta_step" if tokens == 1 else "moe_edge_delta_chunks"
    named = [line for line in launches(text) if f"{name}/pallas_call" in line]
    assert len(named) == int(by_kernel)
    if by_kernel == "1" and tokens == 1:  # in place, whoever rests
        assert not re.findall(r"f32\[(2,4096|64,128),128\]\S* (copy|fusion)", text)


def decoded(layer_io: str, **options) -> dict[str, str]:
    """Name -> text of the programs that decode a token; experts fit the slots."""

    def run():
        given = {"device_memory": "50%", "layer_io": layer_io, "memory": "pinned"}
        reader = StoreReader(ALL["gqa"], dtype=ml_dtypes.bfloat16)
        with make_offloaded(reader, OffloadOptions(**given | options)) as engine:
            session = engine.new_session(1, 64)
            token_B, active_B = engine.put((np.ones(1, np.int32), np.ones(1, bool)))
            engine.decode(session, token_B, active_B)

    calls = programs_of(run)
    names = [call.function.__name__.strip("_") for call in calls]
    return dict(zip(names, compile_all(calls), strict=True))


def test_words_are_one_copy_each_way_and_cost_a_layer_no_kernel():
    plain, packed = decoded("arrays"), decoded("packed")
    text = packed["advance"]
    assert len(launches(text)) == len(launches(plain["advance"])) + 2
    copies = [line for line in launches(text) if " copy-start(" in line]
    to_host, to_device = (
        [line for line in copies if re.search(where, line)]
        for where in (r"\(s32\[3\]\{0:S\(5\)", r"s32\[3\]\{0:S\(5\)\}, u32")
    )
    assert len(to_host) == len(to_device) == 1, copies
    assert HOST_MEMORY not in "".join(plain.values())


def test_words_of_scores_and_gates_compile():
    options = {"predictor": "smoe_partial", "eviction": "smoe_score"}
    assert HOST_MEMORY in decoded("packed", **options)["advance"]
    routed = {"route": "substitute", "predictor": "stale_gate"}
    assert HOST_MEMORY in decoded("packed", **routed)["advance"]


@pytest.mark.parametrize("blocks", [1, 3])
def test_absent_experts_come_by_the_copy_engine_into_slots_in_place(blocks):
    size, shape = 6291456, jax.ShapeDtypeStruct
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    slots_SR = shape((64, size), jnp.bfloat16, sharding=device)
    number = shape((), jnp.int32, sharding=device)
    record_R = shape((size,), jnp.bfloat16, sharding=host_sharding())
    args = slots_SR, blocks * [number], blocks * [record_R]
    write = indexed_slots._write.__wrapped__
    (text,) = compile_all([Call(write, {"donate_argnums": 0}, args, {})])
    found = launches(text)
    assert len(found) == 2 * blocks  # a copy and an update each
    assert sum(" copy-start(" in line for line in found) == blocks
    assert sum("dynamic_update_slice" in line for line in found) == blocks
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in text


@pytest.mark.parametrize("lengths, gpu", [(LENGTHS, "H200"), ((20,), "RTX 4090")])
@pytest.mark.parametrize("name", ["gqa", "gpt_oss"])
def test_steps_without_copies_have_no_loop(name, lengths, gpu):
    slots = 2 * len(lengths) * ALL[name].moe.top_k
    share = {"device_memory": f"{100 * slots / BLOCKS}%", "slot_plan": "equal"}
    options = OffloadOptions(mode="fused", zero_copy=True, **share)

    def run():
        reader = StoreReader(ALL[name], dtype=ml_dtypes.bfloat16)
        with make_offloaded(reader, options) as engine:
            forced_logits(engine, random_prompts(ALL[name], lengths), 2)

    calls = programs_of(run)
    steps = [call for call in calls if "_decode_step" in f"{call}"]
    (text,) = compile_all(steps, GPUS[gpu])
    check_zero_copy(text, RecordLayout.of(ALL[name]).size)


def check_zero_copy(text, size, few=FEW):
    """A step that reads the host where it is and waits for nothing."""
    assert "S(5)" in text and LOOK_UP in text and few in text
    for loop in ("while", "conditional", "custom-call-start"):
        assert f" {loop}(" not in text
    moved = re.findall(rf"\[\d+,{size}\]\S* (copy\S*|fusion)\(", text)
    assert not moved


@pytest.mark.parametrize("tokens, form", [(1, "1"), (8, "1"), (8, "cuda")])
def test_launches_of_a_layer_without_copies(tokens, form, monkeypatch):
    """The look-up, two products and the sum, at any number of rows; by our own CUDA as
    by Triton."""
    if form == "cuda" and native.library() is None:
        pytest.skip("needs the host kernels")
    monkeypatch.setenv(few.VARIABLE, form)
    layers, sizes = 2, {"hidden": 2048, "heads": 16}
    config = config_from_hf(olmoe_config(16, "bfloat16", **sizes))
    E, K, size = config.moe.num_experts, config.moe.top_k, RecordLayout.of(config).size
    device = DeviceCache(CacheSpec(16, E, K, 512 * (-1,)), get_eviction("lru"), (0, 1))
    shape, pinned = jax.ShapeDtypeStruct, jax.devices("cpu")[0]
    pinned = jax.sharding.SingleDeviceSharding(pinned, memory_kind="pinned_host")
    host_ER = shape((E, size), jnp.bfloat16, sharding=pinned)
    with as_on_a_gpu():
        zero_copy = ZeroCopy(device, config)

    def step(cache, x_TD, routings, hosts):
        cache = cache._replace(step=cache.step + 1)
        for layer in range(layers):
            given = routings[layer], hosts[layer]
            cache, y_TD, _ = zero_copy.run(cache, layer, x_TD, *given)
            x_TD = x_TD + y_TD
        return cache, x_TD

    cache = jax.eval_shape(device.empty, shape((512, size), jnp.bfloat16))
    ids, weights = (shape((tokens, K), each) for each in (jnp.int32, jnp.float32))
    routing = Routing(ids, weights, shape((tokens, E), jnp.float32))
    x_TD = shape((tokens, config.d_model), jnp.float32)
    args = cache, x_TD, layers * [routing], layers * [host_ER]
    (text,) = compile_all([Call(native.within(step), {"donate_argnums": 0}, args, {})])
    check_zero_copy(text, size, FEW_CUDA if form == "cuda" else FEW)
    found = launches(text)
    ours = sum(FEW_CUDA in launch for launch in found)
    assert ours == (2 * layers if form == "cuda" else 0)
    assert sum(TRITON in launch for launch in found) + ours == 3 * layers
    # Two more: what slots each layer may use, and the time.
    assert len(found) <= 4 * layers + 2, found


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
    caches = jax.eval_shape(lambda: empty_caches(config, 1, 512)[:layers])
    windows = layers * (shape((), jnp.int32),)
    x_BSD = shape((1, 1, config.d_model), jnp.float32)
    kinds = layers * (0,)
    args = (
        kinds,
        layers * (dense,),
        layers * (experts,),
        windows,
        x_BSD,
        chunk,
        caches,
    )
    step = native.within(ResidentPrograms(config)._layers_step)
    (text,) = compile_all(
        [Call(step, {"static_argnums": 0, "donate_argnums": 6}, args, {})]
    )
    found = launches(text)
    # Four norms, the choice, two products; padding is masked once for all layers. The
    # norms of q and k are the work of attention where that is a kernel.
    triton = 7 if one_kernel == "0" else 6
    assert sum(TRITON in launch for launch in found) == triton * layers
    if jax.__version_info__ < (0, 11):  # where it was counted
        assert len(found) <= MOST_LAUNCHES[one_kernel] * layers + 1, found
