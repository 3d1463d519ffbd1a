"""Makes JAX strict for every test: no silent broadcasting, promotion or device.

Tests run on the CPU, also where there is a GPU; `JAX_PLATFORMS=cuda pytest` (with the
paths of docs/gpu_todo.md) asks for the GPU.
"""

import functools
import gc
import importlib.util
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


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage is collected less often: 10 % of the time of tests that trace programs.

    What is imported and collected here stays to the end, so it is not looked through at
    all; tracing makes many objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Between modules: tests of one module may count what they compile.

    What a module leaves behind, traced programs above all, is looked through once:
    every collection of those after it would cost more and more.
    """
    yield
    free_programs()
    gc.collect()
    gc.freeze()


@functools.cache
def _programs_by_arguments() -> list[tuple]:
    """Modules, the names by which they make programs, and a maker that keeps them."""
    # All that import these names first: they must get the classes.
    from moe_edge.cluster.node.programs import PlacedPrograms
    from moe_edge.cluster.prism import server
    from moe_edge.engine import layered, offloaded, resident, sharded  # noqa: F401

    placed = functools.cache(PlacedPrograms)
    found = [
        (resident, "ResidentPrograms", functools.cache(resident.ResidentPrograms)),
        (layered, "LayerPrograms", functools.cache(layered.LayerPrograms)),
        (server, "PlacedPrograms", placed),
    ]
    if importlib.util.find_spec("moe_edge.papers.od_moe"):  # or it was deleted
        from moe_edge.papers.od_moe.cluster import nodes
        from moe_edge.papers.od_moe.shadow import engine as shadow

        programs = functools.cache(shadow.ShadowPrograms)
        found += [(shadow, "ShadowPrograms", programs)]
        found += [(nodes, "PlacedPrograms", placed)]
    return found


@pytest.fixture(scope="module")
def shared_programs():
    """Engines of one model share their programs, as if given them.

    Also with those of other modules that ask for this. Not for tests that count what an
    engine compiles, or choose kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name, make in _programs_by_arguments():
            patch.setattr(module, name, make)
        yield


@pytest.fixture
def progress_clock(monkeypatch):
    """The clock by which progress is reported in a test."""
    from tests.support.progress_clock import ProgressClock

    clock = ProgressClock()
    monkeypatch.setattr("moe_edge.core.progress._REPORTER", clock.reporter)
    return clock


@pytest.fixture
def few_optimisations():
    """Programs are compiled with few optimisations, all of a test alike.

    A third less processor time where interpreted kernels, which are large programs, run
    a few steps. And a sum has the order that its kernel says: XLA's vectors for a CPU
    may give a row that is alone another than the same row in a loop.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)
