"""The host kernels as JAX functions: products of a few vectors with stored weights.

Built with the package where there is a C++ compiler (`setup.py`); without them XLA
multiplies, as it does on GPUs. Those that can be differentiated: `gradients.py`; those
of attention: `native_attention.py`.
"""

import contextvars
import ctypes
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_known, check_shape
from moe_edge.kernels.build_id import build_id

INSTRUCTIONS = ("avx512", "avx2", "portable")  # the best first
MAX_ROWS = 16  # vectors above which blocks of tokens are faster: `blocks.py`
CHOICES = ("native", "xla")
TARGETS = (
    *("linear", "norm", "top_k", "attend", "attend_chunked", "experts"),
    *("step", "step_chunked", "latent", "delta"),
    *("product", "blocks", "fill", "sum"),
    *("product_back", "train", "train_back", "train_attend", "train_attend_back"),
)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")  # as in types.h
KINDS = {"float32": 0, "bfloat16": 1, "uint16": 1}  # as in types.h
BLOCK_KINDS = {None: 0, "q8_0": 2, "q4_0": 3, "mxfp4": 4}  # of records of bytes
BLOCK_KINDS |= {"q8_0x8": 5, "q4_0x8": 6, "mxfp4x8": 7}  # eight rows interleaved
BLOCK_KINDS |= {"int4x8": 8, "fp8x8": 9}
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.uint16, jnp.uint8)
_wanted = contextvars.ContextVar("moe_edge_kernels", default=False)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, known to JAX; None if there are none.

    Raises:
      ConfigError: they were built from other sources, for another JAX, or for a
        machine that this one is not.
    """
    # Of this Python alone: an older one's may stand beside it.
    path = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        return None
    what_to_do = (
        "run pip install -e . again (against a pinned JAX: with --no-build-isolation), "
        "or set MOE_EDGE_KERNELS=xla"
    )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"{path.name}: the host kernels do not load: {error}; {what_to_do}"
        ) from error
    if _build_id_of(lib) != build_id():
        raise ConfigError(
            f"{path.name}: the host kernels were built of {_build_id_of(lib)!r}, "
            f"here are {build_id()!r}; {what_to_do}"
        )
    lib.moe_edge_instructions.restype = ctypes.c_char_p
    lib.moe_edge_experts_at.restype = ctypes.c_char_p
    lib.moe_edge_experts_at.argtypes = (
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 2,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    )
    lib.moe_edge_copy.restype = None
    lib.moe_edge_copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    for name in TARGETS:
        capsule = jax.ffi.pycapsule(getattr(lib, f"moe_edge_{name}"))
        jax.ffi.register_ffi_target(f"moe_edge_{name}", capsule, platform="cpu")
    return lib


def _build_id_of(lib: ctypes.CDLL) -> str:
    if not hasattr(lib, "moe_edge_build_id"):
        return ""
    lib.moe_edge_build_id.restype = ctypes.c_char_p
    return lib.moe_edge_build_id().decode()


@functools.cache
def choice() -> str:
    """`native` or `xla`: what MOE_EDGE_KERNELS says, or what there is.

    Raises:
      ConfigError: an unknown choice, or native kernels that were not built.
    """
    wanted = os.environ.get("MOE_EDGE_KERNELS")
    if wanted is None:
        return "xla" if library() is None else "native"
    check_known("MOE_EDGE_KERNELS", wanted, CHOICES)
    if wanted == "native" and library() is None:
        raise ConfigError(
            "MOE_EDGE_KERNELS is native, but the kernels were not built; install a C++ "
            "compiler and run pip install -e . again"
        )
    return wanted


def resize(threads: int) -> None:
    """Members of the kernels' team from the next call on.

    Args:
      threads: 0: as at the start, what MOE_EDGE_THREADS says or as many as cores in
        the process's affinity mask.
    """
    library().moe_edge_resize(threads)


def spin(microseconds: int) -> None:
    """How long the team's members stay awake after a call, 200 us at the start.

    One that sleeps is back after 40-100 us; one that is awake gives way to whoever
    wants its core, but not at once.
    """
    library().moe_edge_spin(microseconds)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array over another of its shape and dtype, by all cores of the team.

    Without native kernels, or for what is not contiguous, by one.
    """
    same = target.dtype == source.dtype and target.shape == source.shape
    if not (same and target.flags.writeable):
        raise ConfigError(
            f"a copy of {source.dtype} {source.shape} over {target.dtype} "
            f"{target.shape}; give two arrays alike, the first writeable"
        )
    flags = target.flags, source.flags
    if choice() == "xla" or not all(each.c_contiguous for each in flags):
        np.copyto(target, source)
    else:
        library().moe_edge_copy(target.ctypes.data, source.ctypes.data, target.nbytes)


def use(instructions: str | None) -> bool:
    """The kernels compiled for other instructions, from the next call on.

    Args:
      instructions: portable, avx2, avx512; None: the best that there are.
    Returns:
      Whether this processor has them.
    """
    names = [instructions] if instructions else INSTRUCTIONS
    return any(library().moe_edge_use(name.encode()) for name in names)


def describe() -> str:
    """What multiplies a few vectors on this machine's CPU, for people."""
    if choice() == "xla":
        is_wanted = "MOE_EDGE_KERNELS" in os.environ  # then whatever was built
        return "XLA" if is_wanted else "XLA (no C++ compiler built the host kernels)"
    lib = library()
    instructions, threads = lib.moe_edge_instructions(), lib.moe_edge_threads()
    return f"native, {instructions.decode()}, {threads} threads"


def identity() -> str:
    """What multiplies on a CPU: the same text where the same bits are computed."""
    if choice() == "xla":
        return "XLA"
    return f"native {build_id()}, {library().moe_edge_instructions().decode()}"


def while_wanted(wanted: contextvars.ContextVar, function: Callable) -> Callable:
    """The function, during whose calls (when it is traced) `wanted` is True."""

    @functools.wraps(function)
    def traced(*args, **options):
        token = wanted.set(True)
        try:
            return function(*args, **options)
        finally:
            wanted.reset(token)

    return traced


def within(function: Callable) -> Callable:
    """A function whose products are native wherever it is traced, if they can be."""
    return while_wanted(_wanted, function)


def is_wanted() -> bool:
    """Whether what is traced here is a program of steps (`within`)."""
    return _wanted.get()


def suits(rows: int, weights: jax.Array) -> bool:
    """Whether so many vectors are to meet these weights here."""
    return (
        rows <= MAX_ROWS
        and is_wanted()
        and isinstance(weights, jax.Array)
        and weights.dtype in _DTYPES
        and jax.default_backend() == "cpu"
        and is_native()
    )


def is_native() -> bool:
    """Whether native kernels multiply on a CPU; says so once if they were not built."""
    warn_if_missing()
    return choice() == "native"


@functools.cache
def warn_if_missing() -> None:
    """One line on stderr in each process, unless MOE_EDGE_KERNELS was set."""
    if "MOE_EDGE_KERNELS" not in os.environ and library() is None:
        print(
            "the host kernels were not built, so XLA multiplies, which is slower; "
            "install a C++ compiler (GCC or Clang with C++20) and then this package "
            "again, or set MOE_EDGE_KERNELS=xla to hide this line",
            file=sys.stderr,
            flush=True,
        )


def in_eights(weights: jax.Array, width: int) -> bool:
    """Whether stored rows of so many weights are blocks of eight rows, interleaved."""
    return weights.dtype == jnp.uint8 and weights.shape[1] >= 4 * width


def num_outputs(weights: jax.Array, width: int) -> int:
    """O of stored rows of so many weights."""
    return weights.shape[0] * (8 if in_eights(weights, width) else 1)


def linear(x_TI: jax.Array, *weights: jax.Array, int8: bool = False) -> list[jax.Array]:
    """`x @ weight.T` of each `[O, I]`, float32 `[T, O]`, in one call of the team.

    The bits of a row depend on neither T nor the other weights.

    Args:
      int8: round x in blocks of 32 to 8 bits where it meets interleaved rows.
    """
    T, width = x_TI.shape
    shapes = [
        jax.ShapeDtypeStruct((T, num_outputs(each, width)), jnp.float32)
        for each in weights
    ]
    return jax.ffi.ffi_call("moe_edge_linear", shapes)(x_TI, *weights, int8=int8)


def norm(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of rows, float32; a row's bits do not depend on T."""
    shape = jax.ShapeDtypeStruct(x_TD.shape, jnp.float32)
    return jax.ffi.ffi_call("moe_edge_norm", shape)(x_TD, weight_D, eps=np.float32(eps))


def top_k(x_TE: jax.Array, k: int) -> jax.Array:
    """Ids int32 `[T, k]` of the largest; of equal ones the lower id comes first."""
    shape = jax.ShapeDtypeStruct((x_TE.shape[0], k), jnp.int32)
    return jax.ffi.ffi_call("moe_edge_top_k", shape)(x_TE)


def experts(x_TD, ids_TK, weights_TK, records_ER, layout, act, start_TD, rows=False):
    """The weighted sum of chosen experts, or with `rows` each pair's own output.

    Args: as of `model.experts.run_pairs`.
    Raises:
      ConfigError: x_TD is not of the layout's width.
    """
    T, D = x_TD.shape[0], layout.d_model
    check_shape("x_TD", x_TD, (T, D))
    shape = (ids_TK.size, D) if rows else (T, D)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call("moe_edge_experts", result)(
        x_TD,
        ids_TK,
        weights_TK,
        records_ER,
        start_TD,
        expert_dim=np.int64(layout.expert_dim),
        has_bias=layout.has_bias,
        activation=np.int64(ACTIVATIONS.index(act.keywords["kind"])),
        limit=np.float32(act.keywords["limit"] or 0.0),
        rows=rows,
        kind=np.int64(BLOCK_KINDS[layout.kind]),
        int8=layout.int8,
    )
