"""Text of rows against a reference that sees one character after another."""

import random

import pytest

from moe_edge.model.new_token import NewToken
from moe_edge.serve.text_ends import StopText, TextEnds, _Stop
from tests.support.served import EOS

TEXTS = [
    "日本語🦊日本の語",
    "aababaabababaab",
    "the mill, the miller",
    "naïve café 🦊🦊",
]


def cut_at_stops(text: str, stops) -> tuple[str, bool]:
    """What is shown of a text, and whether a stop string ended it."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def feed(tokenizer, ids, **options):
    """(pieces, tokens, reason or None) of a row; it ends after the last token."""
    stop = [StopText(text) for text in options.pop("stop", ())]
    ends = TextEnds(tokenizer, with_tokens=True, stop=stop, **options)
    pieces, tokens, reason = [], [], None
    for id in ids:
        reason = ends(NewToken("row", id))
        for shown in (ends.take(), ends.take()):
            pieces.append(shown.text)
            tokens += shown.tokens
        if reason:
            break
    ends.finish()
    shown = ends.take()
    return [*pieces, shown.text], [*tokens, *shown.tokens], reason


def random_stops(rng, text: str) -> list[str]:
    stops = []
    for _ in range(rng.randrange(5) if text else 0):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randrange(1, 7)]
        stops.append(stop + rng.choice(["", "", "q"]))
    return stops


@pytest.mark.parametrize("seed", range(8))
def test_pieces_join_to_the_text_before_the_first_stop(tokenizer, seed):
    rng = random.Random(seed)
    for _ in range(60):
        some = tokenizer.encode(rng.choice(TEXTS))
        any_token = rng.random() < 0.3
        ids = [
            rng.randrange(1, 320) if any_token else rng.choice(some)
            for _ in range(rng.randrange(40))
        ]
        text = tokenizer.decode(ids)
        stops = random_stops(rng, text)
        pieces, tokens, reason = feed(tokenizer, ids, stop=stops)
        shown, is_cut = cut_at_stops(text, stops)
        assert "".join(pieces) == shown
        if not is_cut:
            assert reason is None and [each.token for each in tokens] == ids
        offsets = [each.offset for each in tokens]
        assert offsets == sorted(offsets) and all(o <= len(shown) for o in offsets)


def test_nothing_that_a_stop_may_begin_with_is_shown_early(tokenizer):
    ids = tokenizer.encode("aaab aaac")
    pieces, _, reason = feed(tokenizer, ids, stop=["aaac"])
    assert reason == "stop" and "".join(pieces) == "aaab "
    shown = ""
    for piece in pieces:
        shown += piece
        assert "aaab ".startswith(shown)


def test_held_back_text_is_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("mill sto")
    pieces, tokens, reason = feed(tokenizer, ids, stop=["stop"])
    assert reason is None and "".join(pieces) == "mill sto"
    assert "".join(pieces[:-1]) == "mill " and len(tokens) == len(ids)


def test_first_stop_to_be_complete_wins_and_of_two_the_longer():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    def shown(text, stops):
        pieces, _, reason = feed(Letters(), map(ord, text), stop=stops)
        return "".join(pieces), reason

    assert shown("xabcd", ["abcd", "bc"]) == ("xa", "stop")
    assert shown("xabcd", ["bc", "abc", "c"]) == ("x", "stop")
    assert shown("xababac", ["abac"]) == ("xab", "stop")
    assert shown("aaa", ["aaaa"]) == ("aaa", None)


def test_rows_share_what_is_looked_for_and_nothing_else():
    stop = StopText("aab")
    first, second = (_Stop(stop) for _ in range(2))
    assert [first.follow(letter) for letter in "aaaab"] == [0, 0, 0, 0, 3]
    assert second.matched == 0 and second.follow("b") == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_the_row_unless_ignored(tokenizer, ignore_eos):
    mill, sack = tokenizer.encode("mill"), tokenizer.encode(" sack")
    options = {"eos_ids": (EOS,), "ignore_eos": ignore_eos}
    pieces, tokens, reason = feed(tokenizer, [*mill, EOS, *sack], **options)
    # Its text is never shown, its log probability is.
    assert "".join(pieces) == ("mill sack" if ignore_eos else "mill")
    assert reason == (None if ignore_eos else "eos")
    assert [each.token for each in tokens][: len(mill) + 1] == [*mill, EOS]
    assert tokens[len(mill)].offset == 4


def test_eos_inside_of_a_character_shows_what_there_is(tokenizer):
    fox = tokenizer.encode("🦊")
    pieces, tokens, reason = feed(tokenizer, [*fox[:-1], EOS], eos_ids=(EOS,))
    assert ("".join(pieces), reason) == ("\ufffd", "eos")
    assert len(tokens) == len(fox)


def test_offsets_point_at_characters_of_tokens(tokenizer):
    text = "naïve 🦊 mill"
    ids = tokenizer.encode(text)
    _, tokens, _ = feed(tokenizer, ids, first=10)
    before = b""
    for each in tokens:
        whole = before.decode(errors="ignore")  # characters that are complete by then
        assert each.offset == 10 + len(whole)
        before += tokenizer.token_bytes(each.token)
    assert before.decode() == text


def test_silent_row_shows_nothing_and_goes_on(tokenizer):
    pieces, tokens, reason = feed(
        tokenizer, [5, EOS], eos_ids=(EOS,), stop=["x"], silent=True
    )
    assert ("".join(pieces), tokens, reason) == ("", [], None)


def test_pieces_name_no_tokens_unless_asked(tokenizer):
    ends = TextEnds(tokenizer)
    ends(NewToken("row", tokenizer.encode("mill")[0]))
    ends.finish()
    assert ends.take().tokens == () and ends.take() == ("", ())
