"""Prompts of given lengths, some of which begin alike."""

import pytest

from moe_edge.core.checks import RequestError
from moe_edge.loadtest.offered import Offered
from moe_edge.loadtest.prompts import OWN_TEXT, Prompts, text_ids, text_pieces

IDS = list(range(1000, 1300))


def request(id, prompt_tokens, *blocks):
    return Offered(id, 0.0, prompt_tokens, 1, None, blocks)


def test_prompts_with_the_same_first_blocks_begin_with_the_same_tokens():
    prompts = Prompts(IDS, block_tokens=10)
    a, b = prompts(request(0, 25, 7, 8, 9)), prompts(request(1, 40, 7, 8, 5))
    assert len(a) == 25 and len(b) == 40  # the last block may be short, or not be there
    assert a[:20] == b[:20] and a[20:25] != b[20:25]
    assert prompts(request(2, 5, 7))[:5] == a[:5]
    assert prompts(request(0, 25, 7, 8, 9)) == a
    assert Prompts(IDS, 10, seed=1)(request(0, 25, 7, 8, 9)) != a


def test_prompts_of_their_own_are_parts_of_the_text_which_begins_again():
    prompts = Prompts(IDS, block_tokens=10)
    first, other = prompts(request(0, 200)), prompts(request(1, 200))
    assert first != other and len(set(first)) == 200
    steps = {(b - a) % len(IDS) for a, b in zip(first, first[1:], strict=False)}
    assert steps == {1}
    assert len(prompts(request(2, 1000))) == 1000


class Lengths:
    """One token a text, and one before and behind it."""

    def encode(self, text, begin=True, end=True):
        return [0] * begin + [len(text)] + [1] * end


def test_the_text_is_of_the_data_folder_or_our_own(tmp_path):
    assert "".join(text_pieces(None)) == OWN_TEXT.read_text(encoding="utf-8")
    assert text_pieces(str(tmp_path)) == text_pieces(None)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinyshakespeare.txt").write_text("ab" * 30_000)
    assert [len(piece) for piece in text_pieces(str(tmp_path))] == [50_000, 10_000]
    assert text_ids(Lengths(), str(tmp_path)) == [50_000, 10_000]


def test_a_text_without_tokens_is_refused():
    with pytest.raises(RequestError, match="the text of the prompts has no tokens"):
        Prompts([], 10)
