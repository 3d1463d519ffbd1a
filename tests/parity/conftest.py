"""A tiny checkpoint for the tests of the lm-eval adapter."""

import pytest

from moe_edge.engine.load import load_engine
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_engine(checkpoint)
