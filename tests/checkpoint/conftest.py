"""A checkpoint of ours, made once, and copies of it that tests may damage."""

import shutil

import pytest

from moe_edge.convert.convert import convert_checkpoint
from tests.support.tiny_checkpoints import hf_folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    hf = hf_folder(folder / "hf", "qwen2_moe", tie_word_embeddings=False)
    convert_checkpoint(hf, folder / "ours", progress=False)
    return folder / "ours"


@pytest.fixture
def ours(converted, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(converted, tmp_path / "ours")
