"""A tiny checkpoint opened through the public face, shared by tests."""

import functools
import tempfile
from pathlib import Path

import moe_edge as me
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@functools.cache
def tiny_folder() -> Path:
    """A Hugging Face folder with a tokenizer."""
    return write_tiny_checkpoint(Path(tempfile.mkdtemp(prefix="moe-edge-test-")))


@functools.cache
def tiny_model() -> me.Model:
    return me.load(tiny_folder())


@functools.cache
def resident() -> me.Engine:
    return tiny_model().resident()
