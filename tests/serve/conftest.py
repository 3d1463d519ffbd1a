"""A tokenizer and a served model for all tests of the protocol."""

import pytest

from tests.support.served import model_of, text_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return text_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer):
    return model_of(tokenizer)
