"""Makes JAX strict for every test: no silent broadcasting, promotion or device.

Tests run on the CPU, also where there is a GPU; `JAX_PLATFORMS=cuda pytest` (with the
paths of docs/gpu_todo.md) asks for the GPU.
"""

import functools
import os
import time

import pytest

from tests.support.compile_cache import cache_folder, prune

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before JAX starts: several CPU devices, so that device mix-ups can show.
_FLAG = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

# One compilation cache for all tests, workers and scripts, kept between runs. Also
# programs that compile fast are kept: one operation outside jit takes 40 ms to compile
# and 4 ms to read, and there are thousands.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = cache_folder()
    prune(_CACHE, now_s=time.time())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Workers share the cores; two members, so that what they do at once is tested.
os.environ.setdefault("MOE_EDGE_THREADS", "2")

import jax  # noqa: E402

from tests.support.memory_maps import free_programs  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Started here: no test can make the programs of those after it inline.
jax.devices()


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Between modules: tests of one module may count what they compile."""
    yield
    free_programs()


@pytest.fixture(scope="module")
def shared_programs():
    """Engines of one model share their programs in this module, as if given them."""
    # All that import these names first: they must get the classes.
    from moe_edge.engine import layered, offloaded, resident  # noqa: F401

    kinds = (resident, "ResidentPrograms"), (layered, "LayerPrograms")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in kinds:
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture
def progress_clock(monkeypatch):
    """The clock by which progress is reported in a test."""
    from tests.support.progress_clock import ProgressClock

    clock = ProgressClock()
    monkeypatch.setattr("moe_edge.core.progress._REPORTER", clock.reporter)
    return clock
