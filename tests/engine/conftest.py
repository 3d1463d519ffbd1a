"""What tests of engines share."""

import jax
import pytest


@pytest.fixture
def few_optimisations():
    """Programs are compiled with few optimisations, all engines' alike.

    A third less processor time where interpreted kernels, which are large programs, run
    a few steps.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)
