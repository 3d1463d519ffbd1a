"""The form of wikitext-2 is recognised by the text itself, and undone."""

import pytest

from moe_edge.core.checks import RequestError
from moe_edge.evaluate.plain_text import is_wikitext, read_plain_text, undo_wikitext

RAW = (
    " \n = Some Game = \n \n"
    ' The game , a role @-@ playing one , sold 1 @,@ 000 copies ( " hits " ) .'
    " <unk> liked it . It 's the players ' best . \n"
    " = = Plot <unk> = = \n = = Plot = = \n The end . \n"
)
PLAIN = (
    "Some Game\n"
    'The game, a role-playing one, sold 1,000 copies ("hits").'
    " It's the players' best.\nPlot\nThe end."
)


def test_undo_wikitext_golden():
    assert undo_wikitext(RAW) == [PLAIN]


@pytest.mark.parametrize("name", ["wikitext-2/train.txt", "elsewhere/copy.txt"])
def test_form_decides_not_the_place(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(RAW * 2)
    assert read_plain_text(path) == f"{PLAIN}\n{PLAIN}"


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time , she said .\n",
        "We joined ` @-@ ` and dropped <unk> tokens.\n\n== Method ==\n= a == b =\n",
        "mr. <unk> is chairman of <unk> n.v.\n",  # Penn Treebank has no titles
        " = Title = \n\nNo marks of a tokeniser here.\n",
        "x = 1\n= = =\na @-@ b\n",
        " = Title @-@ only = \n",  # an article without text: nothing would be left
    ],
)
def test_other_text_stays_as_it_is(tmp_path, text):
    path = tmp_path / "wikitext" / "t.txt"  # a folder's name says nothing
    path.parent.mkdir()
    path.write_text(text)
    assert read_plain_text(path) == text


def test_title_and_mark_are_both_needed():
    assert is_wikitext(" = A = \n a @,@ b \n")
    assert not is_wikitext(" = = A = = \n a @,@ b \n")


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "e.txt").write_text(" \n")
    with pytest.raises(RequestError, match="is empty"):
        read_plain_text(tmp_path / "e.txt")
