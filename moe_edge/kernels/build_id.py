"""Of what the compiled host kernels were built: `setup.py` writes it, loading compares.

Imports nothing of the package, which is not there yet while it is built.
"""

import hashlib
import re
from pathlib import Path

import jax

SOURCES = Path(__file__).parent / "native"


def build_id() -> str:
    """Hash of the kernels' sources, and version of JAX's interface to them."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    version = ".".join(re.findall(r"#define XLA_FFI_API_M\w+R (\d+)", header))
    return f"{digest.hexdigest()[:16]}, ffi {version}"
