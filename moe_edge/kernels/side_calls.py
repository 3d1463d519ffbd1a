"""Our own calls for a GPU's driver, as JAX makes them, and on a CPU for its shim.

Work beside a program is begun by one FFI call and waited for by another (native/
side_stream.h). Both stay where data put them: what is used after a call is passed
through it, in place.
"""

import ctypes
from collections.abc import Collection, Sequence

import jax

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native, nvrtc

BESIDE = ("start", "wait")


def register(kind: str, what: str, calls: Collection[str] = BESIDE) -> ctypes.CDLL:
    """Makes the calls of a kind known to JAX, on a CPU and a GPU.

    Args:
      kind: `prefetch`, `assist` or `few`; what: it is, for people.
    Returns:
      the host kernels.
    Raises:
      ConfigError: they were not built.
    """
    library = native.library()
    if library is None:
        raise ConfigError(
            f"{what} needs the C++ kernels, which were not built; install a C++ "
            "compiler and run pip install -e . again"
        )
    for name in calls:
        target = f"moe_edge_{kind}_{name}"
        for platform, ending in (("cpu", ""), ("CUDA", "_cuda")):
            capsule = jax.ffi.pycapsule(getattr(library, f"{target}{ending}"))
            jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return library


def load_cuda(library: ctypes.CDLL, kind: str) -> None:
    """Loads the kernel of a kind, where there is a GPU.

    Raises:
      ConfigError: none can be had for this GPU.
    """
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return
    capability, *others = sorted({device.compute_capability for device in devices})
    if others:
        raise ConfigError(
            f"the kernel {kind}.cu is compiled for one kind of GPU, and here are those "
            f"of compute capabilities {', '.join([capability, *others])}; choose with "
            "CUDA_VISIBLE_DEVICES"
        )
    image = nvrtc.compile_cuda(f"{kind}.cu", capability).cubin
    load = getattr(library, f"moe_edge_{kind}_open")
    load.restype, load.argtypes = ctypes.c_char_p, (ctypes.c_char_p, ctypes.c_int64)
    wrong = load(image, len(image))
    if wrong is not None:
        raise ConfigError(f"the kernel {kind}.cu does not load: {wrong.decode()}")


def call(
    target: str,
    given: Sequence[jax.Array],
    read: Collection[int],
    new: Sequence[jax.ShapeDtypeStruct] = (),
    **attributes,
) -> list[jax.Array]:
    """Passes all through in place but what is only read, by place.

    Args:
      new: what the call makes.
      attributes: of the call.
    Returns:
      what is new, then what was passed through.
    """
    passed = [at for at in range(len(given)) if at not in read]
    like = [jax.ShapeDtypeStruct(given[at].shape, given[at].dtype) for at in passed]
    aliases = {at: len(new) + place for place, at in enumerate(passed)}
    results = [*new, *like]
    found = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    return found(*given, **attributes)


def watch(wanted: bool) -> list[str]:
    """What the streams of a CPU were given since the last call, noted from now on if
    wanted: for tests."""
    library = native.library()
    library.moe_edge_side_watch.restype = ctypes.c_char_p
    return library.moe_edge_side_watch(int(wanted)).decode().splitlines()


def events_made() -> int:
    """How many events the streams of a CPU have, used or not: for tests."""
    count = native.library().moe_edge_side_events
    count.restype = ctypes.c_int64
    return count()
