"""What XLA makes of our programs for an NVIDIA GPU, on a machine without one.

The CUDA plugin compiles for a described device. So a program that a GPU would refuse
fails here, and the kernels that a step launches can be counted. Nothing runs.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src import compiler
from jax.experimental import topologies

from moe_edge.engine.offloaded import make_offloaded
from moe_edge.kernels import few, grouped, lookup, rows
from moe_edge.model.record import RecordLayout
from tests.support.gpu_kernels import as_on_a_gpu
from tests.support.layered import StoreReader, forced_logits
from tests.support.some_gpu import on_some_gpu
from tests.support.tiny_models import random_prompts

# As an H200 says of itself.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""
# An RTX 4090, in what compilers ask for.
_OF_4090 = {
    "NVIDIA H200": "NVIDIA GeForce RTX 4090",
    "{ major: 9 }": "{ major: 8 minor: 9 }",
    "core_count: 132": "core_count: 128",
    "shared_memory_per_core: 233472": "shared_memory_per_core: 102400",
    "threads_per_core_limit: 2048": "threads_per_core_limit: 1536",
    "shared_memory_per_block_optin: 232448": "shared_memory_per_block_optin: 101376",
    "bandwidth: 4800000000000": "bandwidth: 1008000000000",
    "l2_cache_size: 52428800": "l2_cache_size: 75497472",
    "clock_rate_ghz: 1.98": "clock_rate_ghz: 2.52",
    "device_memory_size: 150000000000": "device_memory_size: 25000000000",
}
RTX_4090 = functools.reduce(
    lambda text, each: text.replace(*each), _OF_4090.items(), H200
)
GPUS = {"H200": H200, "RTX 4090": RTX_4090}
# Choosing tiles by timing them needs the device.
_OPTIONS = {"xla_gpu_autotune_level": "0"}
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
# Ends of what has begun: part of one launch.
_NO_KERNEL |= {"fusion-done", "copy-done", "async-done"}
_jit = jax.jit


@functools.cache
def described(count: int, target: str = H200) -> list:
    """So many described devices of one host."""
    given = {"topology": f"1x1x{count}", "target_config": target}
    return topologies.get_topology_desc("described", "cuda", **given).devices


def compile_for(function, *args) -> str:
    """The text of a jitted function, compiled for the devices of its arguments."""
    with on_some_gpu():
        lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=_OPTIONS).as_text()


class Call(NamedTuple):
    """A program, and what it was called with: shapes in place of arrays."""

    function: Callable[..., Any]
    options: dict[str, Any]  # of `jax.jit`
    args: tuple
    kwargs: dict[str, Any]

    def compile(self, target: str = H200, dump_to: Path | None = None) -> str:
        """The text of the compiled program, `as_on_a_gpu`.

        Lowered for arrays of a CPU, whose kinds of memory are a GPU's: the described
        device has none.

        Args:
          dump_to: where XLA writes what it makes on the way; None: nowhere.
        """
        with on_some_gpu():
            traced = _jit(self.function, **self.options).trace(
                *self.args, **self.kwargs
            )
            lowered = traced.lower(lowering_platforms=("cuda",))
        dump = {} if dump_to is None else {"xla_dump_to": str(dump_to)}
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=1,
            device_assignment=np.zeros((1, 1), int),
            env_options_overrides=_OPTIONS | dump,
        )
        (device,) = described(1, target)
        executable = device.client.compile(
            lowered.compiler_ir("stablehlo"),
            executable_devices=type(_cpu_devices())((device,)),
            compile_options=options,
        )
        return executable.hlo_modules()[0].to_string()


def _cpu_devices():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    return sharding._internal_device_list


class _Recorded:
    """A jitted function that notes its calls."""

    def __init__(self, calls: dict[str, Call], function, options):
        self._calls, self._function, self._options = calls, function, options
        self._jitted = _jit(function, **options)

    def __getattr__(self, name):
        return getattr(self._jitted, name)

    def __call__(self, *args, **kwargs):
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            shapes = jax.tree.map(shape_of, (args, kwargs))
            call = Call(self._function, self._options, *shapes)
            self._calls.setdefault(f"{self._function}{shapes}", call)
        return self._jitted(*args, **kwargs)


def shape_of(leaf):
    """What a program needs to know of an array."""
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array):
        place = {"sharding": leaf.sharding, "weak_type": leaf.weak_type}
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **place)
    return leaf


def programs_of(run: Callable[[], Any]) -> list[Call]:
    """The programs that `run` calls, made by `jax.jit` in it, a shape each once.

    They run on the CPU, but for products of experts: values mean nothing.
    """
    calls: dict[str, Call] = {}

    def jit(function=None, **options):
        if function is None:
            return functools.partial(jit, **options)
        return _Recorded(calls, function, options)

    def product(x_TI, records_SR, first, blocks, tiles, outputs, **_):
        return jnp.zeros(outputs) if isinstance(outputs, tuple) else outputs

    def few_ffn(x_TD, slots_SR, rows, top_k, *_, **options):
        pairs = x_TD.shape[0] * top_k
        return jnp.zeros((pairs, x_TD.shape[1]), jnp.float32), slots_SR

    def interpreted(function):
        def run(*given, **options):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(jax, "default_backend", lambda: "cpu")
                return function(*given, **options)

        return run

    with as_on_a_gpu() as patch:
        patch.setattr(jax, "jit", jit)
        looks = ((lookup, "look_up"), (lookup, "look_ahead"))
        for module, name in ((rows, "per_row"), *looks):
            patch.setattr(module, name, interpreted(getattr(module, name)))
        patch.setattr(grouped, "product", product)
        patch.setattr(few, "ffn", few_ffn)
        run()
    return list(calls.values())


def compile_all(calls: list[Call], target: str = H200) -> list[str]:
    """Texts of all programs."""
    with as_on_a_gpu():
        return [call.compile(target) for call in calls]


def ptx_of(call: Call, folder: Path, target: str = H200) -> dict[str, str]:
    """Name -> PTX of a program's Triton kernels, which are compiled into a folder."""
    with as_on_a_gpu():
        call.compile(target, folder)
    texts = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    entries = (re.search(r"\.entry (\w+)", text) for text in texts)
    pairs = zip(entries, texts, strict=True)
    return {entry[1]: text for entry, text in pairs if entry is not None}


def launches(text: str) -> list[str]:
    """What a program without loops launches, a line of its text each."""
    found = []
    for line in text[text.index("\nENTRY") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", line)
        if match and match[1] not in _NO_KERNEL:
            found.append(line.strip())
    return found


def decode_step_of(config, options, lengths, target: str = H200) -> str:
    """The text of the one decode step of an offloaded engine, in bfloat16."""

    def run():
        reader = StoreReader(config, dtype=ml_dtypes.bfloat16)
        with make_offloaded(reader, options) as engine:
            forced_logits(engine, random_prompts(config, lengths), 2)

    calls = [call for call in programs_of(run) if "_decode_step" in f"{call}"]
    (text,) = compile_all(calls, target)
    return text


def check_asks_no_host(text: str, config) -> None:
    """Nobody reads a flag on the host, and nobody copies slots."""
    for loop in ("while", "conditional", "custom-call-start"):
        assert f" {loop}(" not in text
    check_copies_no_slots(text, config)


def check_copies_no_slots(text: str, config) -> None:
    """They are read and filled where they are."""
    size = RecordLayout.of(config).size
    assert not re.findall(rf"\[\d+,{size}\]\S* (copy\S*|fusion)\(", text)
