"""Compiles our CUDA sources by NVRTC, which needs neither a driver nor headers.

The library is part of JAX's CUDA packages, or of a CUDA installation.
"""

import ctypes
import sys
from pathlib import Path
from typing import NamedTuple

from moe_edge.core.checks import ConfigError

NAMES = ("libnvrtc.so.12", "libnvrtc.so.13")
SOURCES = Path(__file__).parent / "native"
# A product and a sum are rounded as one where a source says `fmaf`, nowhere else: so a
# function has the same bits wherever it is inlined.
OPTIONS = (b"--std=c++17", b"--fmad=false", f"--include-path={SOURCES}".encode())


class Compiled(NamedTuple):
    """A source for one kind of GPU."""

    cubin: bytes  # which a driver loads as it is
    ptx: str  # which people can read


def library() -> ctypes.CDLL:
    """NVRTC, of Python's packages before the system's.

    Raises:
      ConfigError: there is none.
    """
    found = [
        path
        for folder in sys.path
        for path in Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*")
    ]
    paths = sorted(str(path) for path in found if path.name in NAMES)
    for path in (*paths, *NAMES):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ConfigError(
        f"no NVRTC ({' or '.join(NAMES)}), which compiles kernels for this GPU; "
        'install it with pip install "jax[cuda12]"'
    )


def compile_cuda(name: str, capability: str) -> Compiled:
    """A source of `kernels/native`, compiled.

    Args:
      name: of the file.
      capability: of the GPU, as JAX says it: `9.0`.
    Raises:
      ConfigError: no NVRTC, or one that refuses the source or this GPU.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    source = (SOURCES / name).read_bytes()

    def call(function: str, *given) -> None:
        status = getattr(nvrtc, f"nvrtc{function}")(*given)
        if status == 0:
            return
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        why = nvrtc.nvrtcGetErrorString(status).decode()
        log = read("ProgramLog") if function == "CompileProgram" else b""
        said = log.rstrip(b"\0").decode().strip()
        raise ConfigError(
            f"NVRTC does not compile {name} for compute capability {capability}: {why} "
            f"{said}".rstrip()
        )

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        call(f"Get{what}", program, text)
        return text.raw

    made = ctypes.byref(program)
    call("CreateProgram", made, source, name.encode(), 0, None, None)
    try:
        arch = f"--gpu-architecture=sm_{capability.replace('.', '')}".encode()
        options = (ctypes.c_char_p * (1 + len(OPTIONS)))(arch, *OPTIONS)
        call("CompileProgram", program, len(options), options)
        return Compiled(read("CUBIN"), read("PTX").rstrip(b"\0").decode())
    finally:
        nvrtc.nvrtcDestroyProgram(made)
