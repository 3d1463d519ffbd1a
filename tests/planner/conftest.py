import pytest

from tests.support.public import tiny_folder


@pytest.fixture(scope="session")
def tiny():
    """A tiny random Hugging Face checkpoint with a tokenizer."""
    return tiny_folder()
