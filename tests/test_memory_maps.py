"""Compiled programs are forgotten before they take too many memory maps."""

import jax
import jax.numpy as jnp
import pytest

from tests.support import memory_maps


@pytest.mark.slow
@pytest.mark.skipif(not memory_maps.count(), reason="only Linux has /proc/self/maps")
def test_programs_are_dropped_only_above_the_limit():
    step = jax.jit(lambda x: jnp.sort(x) @ x)
    step(jnp.ones(8))
    maps = memory_maps.count()
    memory_maps.free_programs(most=10 * maps)  # threads may have added some
    assert step._cache_size() == 1
    memory_maps.free_programs(most=0)
    assert step._cache_size() == 0 and memory_maps.count() < maps
