"""Engines run on a CPU as they do on a GPU, with the GPU's kernels interpreted."""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental import pallas as pl

from moe_edge.engine.load import load_engine
from moe_edge.evaluate.perplexity import Perplexity, measure_perplexity
from moe_edge.kernels import rows


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Our code takes the ways that it takes on a GPU; nothing is compiled for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        jax.clear_caches()
        yield patch
    jax.clear_caches()


@contextlib.contextmanager
def interpreted_kernels(parts: str | None) -> Iterator[pytest.MonkeyPatch]:
    """As on a GPU, with rows that meet bfloat16 in so many parts; None: the default."""

    def interpreted(*args, call=pl.pallas_call, **options):
        function = call(*args, **options | {"interpret": True})
        return lambda *operands: function(*map(_on_device, operands))

    with as_on_a_gpu() as patch:
        patch.setattr(pl, "pallas_call", interpreted)
        patch.setattr(rows, "is_interpreted", lambda: True)
        if parts is None:
            patch.delenv("MOE_EDGE_PARTS", raising=False)
        else:
            patch.setenv("MOE_EDGE_PARTS", parts)
        yield patch


def _on_device(operand):
    """A kernel reads the host's memory where it lies; JAX's interpreter does not."""
    is_on_host = jax.typeof(operand).memory_space == jax.memory.Space.Host
    return jax.device_put(operand, jax.memory.Space.Device) if is_on_host else operand


def default_models_perplexity(text: str, tokens: int, parts: str | None) -> Perplexity:
    """Of the first tokens of a text, in windows of up to 512 side by side."""
    with interpreted_kernels(parts):
        loaded = load_engine("default")
        ids = loaded.tokenizer.encode(text)[:tokens]
        return measure_perplexity(loaded.engine, ids, stride=min(512, tokens))
