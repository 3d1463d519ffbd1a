"""Order of the data: domains in proportion, epochs, resumption."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.training import data
from moe_edge.training.tokenizer import END_OF_TEXT, train_tokenizer


def _corpus():
    streams = {
        "a": np.arange(4 * data.CHUNK + 1, dtype=np.int32),
        "b": np.arange(10**6, 10**6 + 2 * data.CHUNK + 1, dtype=np.int32),
    }
    return data.Corpus(streams, streams, {"a": 0.75, "b": 0.25})


def test_chunk_order_draws_by_share_and_every_chunk_once_an_epoch():
    order = data.ChunkOrder(_corpus(), seed=1)
    drawn = [order.next_chunk() for _ in range(16)]
    assert [domain for domain, _ in drawn].count("a") == 12
    starts = [int(chunk[0]) for domain, chunk in drawn if domain == "a"]
    for epoch in range(3):
        assert sorted(starts[4 * epoch : 4 * epoch + 4]) == [0, 512, 1024, 1536]


def test_chunk_order_resumed_at_position_matches_uninterrupted():
    whole, resumed = (data.ChunkOrder(_corpus(), seed=1) for _ in range(2))
    batches = [whole.next_batch(3, 256) for _ in range(4)]
    resumed.skip_to(9)
    np.testing.assert_array_equal(resumed.next_batch(3, 256).rows, batches[3].rows)
    assert resumed.position == whole.position == 12


@pytest.mark.parametrize("length", [256, 512])
def test_next_batch_rows_are_inputs_and_shifted_targets_of_one_domain(length):
    rows, weights = data.ChunkOrder(_corpus(), seed=0).next_batch(4, length)
    assert weights is None
    assert rows.shape == (4 * data.CHUNK // length, length + 1)
    assert (np.diff(rows, axis=1) == 1).all()


def test_next_batch_rejects_length_that_does_not_divide():
    with pytest.raises(ConfigError, match="sequence length 300 must divide 512"):
        data.ChunkOrder(_corpus(), seed=0).next_batch(1, 300)


def test_held_out_rows_of_short_stream_wrap():
    rows = data.held_out_rows(np.arange(10, dtype=np.int32), 3, 4)
    np.testing.assert_array_equal(rows[2], [8, 9, 0, 1, 2])


def test_encode_documents_ends_each_with_end_of_text_and_round_trips():
    tokenizer = train_tokenizer(["the cat sat on the mat 123"] * 20, 300)
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    ids = data.encode_documents(tokenizer, ["the cat", "née 2024"])
    assert (ids == 0).sum() == 2 and ids[-1] == 0
    parts = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert parts == f"the cat{END_OF_TEXT}née 2024{END_OF_TEXT}"
    assert len(tokenizer.encode("2024").ids) == 4  # digits are apart


def test_build_corpus_rejects_short_domain():
    tokenizer = train_tokenizer(["abc"], 300)
    with pytest.raises(ConfigError, match="domain 'x' has [24] training tokens"):
        data.build_corpus(tokenizer, {"x": (["abc"], ["abc"])}, {"x": 1.0})
