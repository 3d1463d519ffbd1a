"""Measures what the cost model asks of a device, on the machine at hand.

A block is run at several batch sizes, each call on another copy of it, so that caches
do not help. The fixed time of a call is that of a block of a few values; the memory
rate comes from one token (bound by reading weights), the arithmetic rate from the
largest batch, and a curve of factors (`Device.curve`) from the sizes between, which no
two rates describe on a CPU: two tokens may take twice as long as one. The fit is judged
at sizes that it was not made from.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import progress
from moe_edge.hardware.cost_model import BlockShape, roofline_s
from moe_edge.hardware.presets import FORMAT_VERSION
from moe_edge.hardware.specs import Device, Gpu, Link

DTYPES = {"float32": 4, "bfloat16": 2}
TINY = 8  # width of a block whose arithmetic takes no time
BETWEEN = (2, 4, 8, 16, 64)
HELD_OUT = (3, 6, 12, 32, 128)
LARGE_ERROR = 0.25  # relative, above which costs are not to be trusted


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Attributes:
      gpu: its numbers, as any preset has them.
      block: the shape that was run.
      rows: (tokens, measured seconds, seconds by the fitted formula), HELD_OUT ones
        too.
      copy_bytes_per_s: of reading and writing a large array on the device.
    """

    gpu: Gpu
    block: BlockShape
    rows: tuple[tuple[int, float, float], ...]
    copy_bytes_per_s: float

    @property
    def worst_error(self) -> float:
        """Largest relative error of the formula over the batch sizes."""
        return max(abs(fitted / seen - 1) for _, seen, fitted in self.rows)

    @property
    def warning(self) -> str | None:
        """One line for people where the formula is far from what was measured."""
        if self.worst_error <= LARGE_ERROR:
            return None
        tokens, seen, fitted = max(self.rows, key=lambda row: abs(row[2] / row[1] - 1))
        return (
            f"the fit is off by up to {100 * self.worst_error:.0f} %: {tokens} tokens "
            f"took {1e3 * seen:.3f} ms, the formula says {1e3 * fitted:.3f}; measure "
            "again on a quiet machine, or with more --repeats"
        )

    def to_json(self) -> dict[str, Any]:
        """What is stored, for `presets.read_machine`."""
        return {
            "format_version": FORMAT_VERSION,
            "device": dataclasses.asdict(self.gpu.device),
            "host_link": dataclasses.asdict(self.gpu.host_link),
            "block": dataclasses.asdict(self.block),
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "worst_error": self.worst_error,
            "warning": self.warning,
            "rows": [
                {"tokens": t, "measured_s": s, "fitted_s": f, "held_out": t in HELD_OUT}
                for t, s, f in self.rows
            ],
        }


def calibrate(
    name: str,
    *,
    d_model: int = 2048,
    expert_dim: int = 1408,
    dtype: str = "float32",
    copies: int = 4,
    most_tokens: int = 256,
    repeats: int = 5,
    seed: int = 0,
) -> Calibration:
    """Measures the default JAX device; arguments as `run_profile_machine` takes them.

    Raises:
      ConfigError: sizes that are no counts, an unknown dtype, or times too short for
        the clock.
    """
    given = locals()
    check_known("dtype", dtype, DTYPES)
    for field in ("d_model", "expert_dim", "copies", "repeats"):
        check_count(field, given[field])
    if most_tokens < 2:
        raise ConfigError(f"most_tokens is {most_tokens}, expected at least 2")
    keep_heap()  # as engines do: else page faults are measured
    rng = np.random.default_rng(seed)
    block = BlockShape(d_model, expert_dim, DTYPES[dtype])
    blocks = [_weights(rng, d_model, expert_dim, dtype) for _ in range(copies)]
    tiny = [_weights(rng, TINY, TINY, dtype)]
    call_s = _block_seconds(tiny, 1, repeats * copies)
    between = [tokens for tokens in (*BETWEEN, *HELD_OUT) if tokens < most_tokens]
    seen = {
        tokens: _block_seconds(blocks, tokens, repeats)
        for tokens in progress(sorted({1, most_tokens, *between}), "sizes timed")
    }
    device = jax.devices()[0]
    rates = Device(
        name=name,
        memory_bytes=_memory_bytes(device),
        flops_per_s=_rate(block.flops(most_tokens), seen[most_tokens], call_s),
        memory_bytes_per_s=_rate(block.num_bytes, seen[1], call_s),
        call_s=call_s,
        source=f"measured: {device.device_kind}, {dtype}, jax {jax.__version__}",
    )
    fitted = dataclasses.replace(rates, curve=_curve(rates, block, seen))
    formula_s = functools.partial(roofline_s, fitted, num_bytes=block.num_bytes)
    rows = tuple((t, s, float(formula_s(block.flops(t)))) for t, s in seen.items())
    link = host_link(block.num_bytes, repeats * copies)
    rate = copy_rate(64 * 2**20, repeats)
    return Calibration(Gpu(device=fitted, host_link=link), block, rows, rate)


def _curve(
    rates: Device, block: BlockShape, seen: Mapping[int, float]
) -> tuple[tuple[float, float], ...]:
    """How much longer than by its rates a device took, at the sizes of the fit."""
    points = []
    for tokens, seconds in seen.items():
        if tokens not in HELD_OUT:
            flops = block.flops(tokens)
            bound_s = roofline_s(rates, flops, block.num_bytes) - rates.call_s
            factor = max(seconds - rates.call_s, 0.01 * bound_s) / bound_s
            points.append((flops / block.num_bytes, float(factor)))
    return tuple(points)


def host_link(num_bytes: int, repeats: int) -> Link:
    """The copy from host memory to the device: fixed time and rate.

    Where the device is the host, it is a copy within its memory.
    """
    large = np.ones(num_bytes, np.uint8)
    small_s = _seconds(lambda: _to_device(large[:64]), repeats)
    large_s = _seconds(lambda: _to_device(large), repeats)
    return Link(
        bytes_per_s=_rate(num_bytes, large_s, small_s),
        latency_s=small_s,
        source=f"measured: copies of {num_bytes} bytes from unpinned host memory",
    )


def copy_rate(num_bytes: int, repeats: int) -> float:
    """Bytes a second that are read and written by a copy on the device."""
    array = jnp.ones(num_bytes // 4, jnp.float32)
    add = jax.jit(lambda x: x + np.float32(1))
    add(array).block_until_ready()
    return 2 * num_bytes / _seconds(lambda: add(array), repeats)


def _weights(rng, d_model: int, expert_dim: int, dtype: str) -> tuple[jax.Array, ...]:
    """gate [F, D], up [F, D], down [D, F] on the device."""
    shapes = [(expert_dim, d_model), (expert_dim, d_model), (d_model, expert_dim)]
    return tuple(
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes
    )


def _block(x_TD, gate_FD, up_FD, down_DF):
    hidden_TF = jax.nn.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)
    return hidden_TF @ down_DF.T


def _block_seconds(blocks: Sequence, tokens: int, repeats: int) -> float:
    """Median seconds of one block over `tokens` tokens."""
    down_DF = blocks[0][2]
    x_TD = jnp.ones((tokens, down_DF.shape[0]), down_DF.dtype)
    run = jax.jit(_block)
    run(x_TD, *blocks[0]).block_until_ready()
    times = [
        _seconds(lambda block=block: run(x_TD, *block), 1)
        for _ in range(repeats)
        for block in blocks
    ]
    return statistics.median(times)


def _seconds(function: Callable[[], jax.Array], repeats: int) -> float:
    """Median seconds until the result is there."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _to_device(array: np.ndarray) -> jax.Array:
    return jnp.array(array, copy=True)  # device_put may alias where both are one


def _rate(work: float, seconds: float, fixed_s: float) -> float:
    if seconds <= fixed_s:
        raise ConfigError(
            f"{work:.0f} bytes or operations took {seconds:.2e} s, no longer than an "
            f"empty call ({fixed_s:.2e} s); measure a larger block"
        )
    return work / (seconds - fixed_s)


def _memory_bytes(device: jax.Device) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
