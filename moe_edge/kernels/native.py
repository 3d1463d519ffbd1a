"""The host kernels as JAX functions: products of a few vectors with stored weights.

Built with the package where there is a C++ compiler (`setup.py`); without them XLA
multiplies, as it does on GPUs. Those that can be differentiated: `gradients.py`.
"""

import contextvars
import ctypes
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
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


def num_outputs(weights: jax.Array, width: int) -> int:
    """O of stored rows of so many weights: of interleaved ones eight are one."""
    in_eights = weights.dtype == jnp.uint8 and weights.shape[1] >= 4 * width
    return weights.shape[0] * (8 if in_eights else 1)


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


def attend(
    q_BSHP, k, v, start_B, window, scale: float, sinks_H=None, chunked: bool = False
):
    """Causal attention over a cache that holds the tokens' own keys and values.

    A row's bits depend on neither the other rows nor the capacity M.

    Args:
      q_BSHP: float32; query h belongs to head h // (H / G) of the cache.
      k, v: caches `[B * G, M, P]`, or `[M, P]` if that is one row, of one type of
        `model.cache_types`; v may have another width W.
      start_B: int32, position of the first token of each row.
      window: int32 scalar, see `model.kv_cache.visible`; `chunked` too.
      sinks_H: float32 logits that join the denominator, or None.
    Returns:
      float32 `[B, S, H, W]`.
    """
    sinks_H = jnp.zeros(0, jnp.float32) if sinks_H is None else sinks_H
    name = "moe_edge_attend_chunked" if chunked else "moe_edge_attend"
    shape = *q_BSHP.shape[:-1], _cached_width(v)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32))
    scale = np.float32(scale)
    return call(q_BSHP, k, v, start_B, window, sinks_H, scale=scale)


def _cached_width(cache: jax.Array) -> int:
    """Values in a row of a cache; those of bytes are blocks of q8_0."""
    width = cache.shape[-1]
    return width if cache.dtype != jnp.uint8 else width // 34 * 32


def delta(q_NK, k_NK, v_NV, g_N, beta_N, state) -> tuple[jax.Array, jax.Array]:
    """A step of N heads of delta-nets: see `model.delta_net.step`.

    The state is written in place if nobody else needs it; a head whose g and beta are 0
    keeps its bits. A head's bits do not depend on the others.

    Args:
      state: `[..., V]`, N x K x V in the shape that its cache has: a reshape before a
        call in place is a copy to XLA, and one behind it another.
    Returns:
      (float32 `[N, V]`, state).
    """
    like = jax.ShapeDtypeStruct(v_NV.shape, jnp.float32)
    after = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    aliases = {5: 1}
    call = jax.ffi.ffi_call(
        "moe_edge_delta", (like, after), input_output_aliases=aliases
    )
    return tuple(call(q_NK, k_NK, v_NV, g_N, beta_N, state))


def step(
    products: Sequence[jax.Array],
    caches: Sequence[jax.Array],
    norms: Sequence[jax.Array],
    tables: Sequence[jax.Array] | None,
    start_B,
    window,
    scale: float,
    *,
    eps: float,
    interleaved: bool,
    sinks_H=None,
    chunked: bool = False,
) -> list[jax.Array]:
    """Attention of one token in each row, from its products on, in one call.

    Its bits are those of norms, `model.rope.rotate`, `kv_cache.write` and `attend`.

    Args:
      products: float32 q `[B, H, P]`, k `[B, G, P]`, v `[B, G, W]`.
      caches: of k and v, as of `attend`; written in place where they are donated.
      norms: float32 weights `[P]` of heads of q and k; or neither.
      tables: cosines and sines `[B, 1, half]` of the positions, None: no rotation.
      start_B: int32, position of each token.
      window, scale, sinks_H, chunked: as of `attend`.
      eps: of the norms; interleaved: see `rotate`.
    Returns:
      float32 `[B, H, W]`, and the caches.
    """
    none = jnp.zeros(0, jnp.float32)
    norms, tables = norms or (none, none), tables or (none, none)
    sinks_H = none if sinks_H is None else sinks_H
    q, _, v = products
    y = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[-1]), jnp.float32)
    results = [y, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in caches)]
    name = "moe_edge_step_chunked" if chunked else "moe_edge_step"
    call = jax.ffi.ffi_call(name, results, input_output_aliases={3: 1, 4: 2})
    given = *products, *caches, *norms, *tables, start_B, window, sinks_H
    options = {"scale": np.float32(scale), "eps": np.float32(eps)}
    return call(*given, **options, interleaved=interleaved)


def step_latent(
    q_BHP,
    low_BL,
    cache,
    norm_R,
    up_OR,
    tables,
    start_B,
    window,
    scale: float,
    *,
    eps: float,
    interleaved: bool,
    value: int,
) -> list[jax.Array]:
    """Latent attention of one token in each row, from its products on, in one call.

    A row's bits depend on neither the other rows nor the capacity M.

    Args:
      q_BHP: float32 queries, of each head the N values without rotation first.
      low_BL: float32, latent and shared key `[B, R + O]`, neither normed nor rotated.
      cache: `[B, M, R + O]`, or `[M, R + O]` if that is one row, of a type of
        `model.cache_types`; written in place where it is donated.
      norm_R: float32 weights of the latent's norm.
      up_OR: stored up-projections `[H * (N + value), R]`: each head's of keys, then
        that of values.
      tables: cosines and sines `[B, 1, O / 2]` of the positions.
      start_B: int32, position of each token.
      window, scale: as of `attend`; eps: of the norm; interleaved: see `rotate`.
      value: width of a head's values.
    Returns:
      float32 `[B, H, value]`, and the cache.
    """
    y = jax.ShapeDtypeStruct((*q_BHP.shape[:2], value), jnp.float32)
    results = [y, jax.ShapeDtypeStruct(cache.shape, cache.dtype)]
    call = jax.ffi.ffi_call("moe_edge_latent", results, input_output_aliases={2: 1})
    given = q_BHP, low_BL, cache, norm_R, up_OR, *tables, start_B, window
    options = {"scale": np.float32(scale), "eps": np.float32(eps)}
    return call(*given, **options, interleaved=interleaved)


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
