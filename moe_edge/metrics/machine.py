"""What a run ran on: machine, versions, source state."""

import functools
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from moe_edge.core.process import cpu_cores

REPOSITORY = Path(__file__).resolve().parents[2]
# Device files of NVIDIA GPUs, AMD GPUs, TPUs and WSL's GPUs.
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio", "/dev/dxg")


def run_tool(*command: str) -> str | None:
    """Output of a command, None where it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def git_state() -> dict[str, Any]:
    """Commit, and whether files but results/ differ from it; None without git.

    MOE_EDGE_COMMIT names the commit of sources that were copied without their history.
    """
    if not (REPOSITORY / ".git").exists():  # installed from a wheel, or copied
        commit = os.environ.get("MOE_EDGE_COMMIT")
        return {"commit": commit, "dirty": None}
    git = ("git", "-C", str(REPOSITORY))
    # An entry written before does not change what the next one runs.
    status = run_tool(*git, "status", "--porcelain", "--", ".", ":!results")
    return {
        "commit": run_tool(*git, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def ram_bytes() -> int | None:
    """Physical memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def gpu_name() -> str | None:
    """Kind of the default device if it is no CPU."""
    if not any(map(os.path.exists, ACCELERATORS)):
        return None  # without loading JAX
    import jax

    device = jax.devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def device_slug() -> str:
    """Short name for folders: `cpu2` (cores) or a GPU's kind."""
    gpu = gpu_name()
    if gpu is None:
        return f"cpu{cpu_cores()}"
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


@functools.cache
def machine_info() -> dict[str, Any]:
    """The `machine` part of a results entry; what is not known is None."""
    import jax
    import jaxlib

    from moe_edge.kernels import decode_attention, few, grouped, native
    from moe_edge.model import cached_attention

    gpu, kernels = gpu_name(), native.describe()
    if jax.default_backend() == "gpu":
        kinds = grouped, few, decode_attention, cached_attention
        kernels += f"; on the GPU {', '.join(each.describe() for each in kinds)}"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "cpu": cpu_name(),
        "cores": cpu_cores(),
        "ram_bytes": ram_bytes(),
        "gpu": gpu,
        "driver": run_tool(*query) if gpu else None,
        "host_to_device_bytes_per_s": None,
        "disk_bytes_per_s": None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "backend": jax.default_backend(),
        "kernels": kernels,
    }
