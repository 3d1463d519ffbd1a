"""Which kernels multiply: what was built, what is wanted, and what is refused."""

import ctypes

import jax.numpy as jnp
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native
from tests.support.host_kernels import needs_kernels


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is loaded or chosen yet, neither here nor afterwards."""
    monkeypatch.undo()
    kept = native.library, native.choice, native.warn_if_missing
    for each in kept:
        each.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for each in kept:
        each.cache_clear()


def test_a_wrong_choice_is_refused(fresh):
    fresh.setenv("MOE_EDGE_KERNELS", "fast")
    with pytest.raises(ConfigError, match="MOE_EDGE_KERNELS"):
        native.choice()


def test_kernels_that_were_not_built(fresh):
    fresh.setattr(native.sysconfig, "get_config_var", lambda _: ".of_another_python")
    fresh.delenv("MOE_EDGE_KERNELS", raising=False)
    assert native.choice() == "xla" and native.library() is None
    assert native.describe() == "XLA (no C++ compiler built the host kernels)"
    native.choice.cache_clear()
    fresh.setenv("MOE_EDGE_KERNELS", "native")
    with pytest.raises(ConfigError, match="install a C"):
        native.choice()


def test_steps_without_kernels_say_so_once(fresh, capfd):
    fresh.setattr(native.sysconfig, "get_config_var", lambda _: ".of_another_python")
    fresh.delenv("MOE_EDGE_KERNELS", raising=False)
    wanted, weights = native.within(native.suits), jnp.ones((2, 2))
    assert not native.suits(1, weights)  # no step of a model
    assert capfd.readouterr().err == ""
    assert not wanted(1, weights) and not wanted(1, weights)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("the host kernels were not built, so XLA multiplies, which")
    assert "install a C++ compiler" in said and "MOE_EDGE_KERNELS=xla" in said
    native.warn_if_missing.cache_clear()
    native.choice.cache_clear()
    fresh.setenv("MOE_EDGE_KERNELS", "xla")  # as the line says
    assert not wanted(1, weights)
    assert capfd.readouterr().err == ""


@needs_kernels
def test_kernels_built_of_something_else_are_refused(fresh):
    fresh.delenv("MOE_EDGE_KERNELS", raising=False)
    fresh.setattr(native, "build_id", lambda: "other sources")
    with pytest.raises(ConfigError, match=r"pip install -e \. again .*KERNELS=xla"):
        native.choice()
    fresh.setenv("MOE_EDGE_KERNELS", "xla")  # as the message says
    assert native.describe() == "XLA"


@needs_kernels
def test_kernels_that_do_not_load_are_refused(fresh):
    def load(path):
        raise OSError("version `GLIBCXX_9.9.9' not found")

    fresh.setattr(ctypes, "CDLL", load)
    with pytest.raises(ConfigError, match="GLIBCXX_9.9.9.*pip install"):
        native.library()


def test_without_the_choice_nothing_is_native(monkeypatch):
    wanted = native.within(native.suits)
    assert wanted(1, jnp.ones((2, 2))) and not wanted(1, jnp.ones((2, 2), jnp.int8))
    monkeypatch.setattr(native, "choice", lambda: "xla")
    assert not wanted(1, jnp.ones((2, 2)))
