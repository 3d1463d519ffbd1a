"""What is collected here, and a tiny checkpoint for tests of the lm-eval adapter."""

import pytest

from moe_edge.engine.load import load_engine
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def pytest_ignore_collect(config):
    """Where no test here runs, its file is not read: torch takes seconds to import."""
    default = "not parity and "  # pyproject.toml
    return True if config.option.markexpr.startswith(default) else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_engine(checkpoint)
