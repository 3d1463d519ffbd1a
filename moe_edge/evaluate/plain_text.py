"""Text as a model is meant to read it: the tokenisation of wikitext-2 undone.

Calibration, training and evaluation read files through `read_plain_text`, so that the
same file means the same tokens to all of them.
"""

import re
from pathlib import Path

from moe_edge.evaluate.texts import read_text

_TITLE = re.compile(r"^ *= [^=\n]+ = *$", re.MULTILINE)
_MARKS = re.compile(r" @[-,.]@ | <unk> ")


def read_plain_text(path: str | Path) -> str:
    """A UTF-8 file; one in the form of wikitext-2 as plain prose.

    The text itself decides, wherever it lies: such a file has article titles `= A =`
    and marks ` @-@ ` or ` <unk> `. Others, also prose about wikitext, stay as they are.

    Raises:
      RequestError: not UTF-8, or empty.
      OSError: it cannot be read.
    """
    text = read_text(path)
    if not is_wikitext(text):
        return text
    return "\n".join(undo_wikitext(text)) or text


def is_wikitext(text: str) -> bool:
    """Whether a text is tokenised as wikitext-2 is."""
    return bool(_TITLE.search(text)) and bool(_MARKS.search(text))


def undo_wikitext(text: str) -> list[str]:
    """Articles of a wikitext-2 file as plain prose.

    Rules: ` @-@ `, ` @,@ ` and ` @.@ ` are joined; spaces before closing and after
    opening punctuation go; straight quotes alternate between opening and closing in a
    paragraph; a sentence with `<unk>` is dropped, and a heading with one too.
    Headings `= A =` become plain lines.
    """
    articles: list[list[str]] = []
    for line in text.split("\n"):
        line = line.strip()
        heading = re.fullmatch(r"(=(?: =)*) (.+?) (=(?: =)*)", line)
        if heading and heading[1] == "=":
            articles.append([])
        if not line or not articles:
            continue
        if heading:
            line = heading[2]
        sentences = re.split(r"(?<= [.?!]) ", line)
        line = " ".join(s for s in sentences if "<unk>" not in s)
        if len(line) > 1:
            articles[-1].append(_join_tokens(line))
    return ["\n".join(article) for article in articles if len(article) > 1]


def _join_tokens(line: str) -> str:
    line = re.sub(r" @([-,.])@ ", r"\1", line)
    line = re.sub(r" ([,.;:?!%)\]}])", r"\1", line)
    line = re.sub(r"([(\[{$£]) ", r"\1", line)
    line = re.sub(r" ('(?:s|t|re|ve|ll|d|m)\b)", r"\1", line)
    line = re.sub(r"(\w) n't\b", r"\1n't", line)
    line = re.sub(r"s ' ", "s' ", line)  # possessive of a plural
    parts = re.split(r' ?" ?', line)
    joined = parts[0]
    for nth, part in enumerate(parts[1:]):
        opening = nth % 2 == 0
        left = " " if opening and joined and joined[-1] not in "([" else ""
        right = "" if opening or part[:1] in (*",.;:?!)", "") else " "
        joined += left + '"' + right + part
    return joined.strip()
