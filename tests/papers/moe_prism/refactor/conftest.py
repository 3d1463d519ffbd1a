"""A tiny model and its profile, made once for all tests of refactoring."""

import numpy as np
import pytest

from moe_edge.profile.run_profile import run_profile
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).permutation((12 * TEXT).split())
    path.write_text(" ".join(words))
    return str(path)


@pytest.fixture(scope="session")
def profile(tiny, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "p"
    run_profile(out_dir=str(out), text=text, checkpoint=str(tiny), window=64)
    return str(out)
