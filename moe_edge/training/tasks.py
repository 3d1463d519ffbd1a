"""Rows of questions whose answers alone are learnt: supervised fine-tuning.

A row is the beginning of a document without end, of one family, in the format in which
studies ask: "question\nAnswer: answer", an empty line, the next one. Every target that
is no answer has no weight: most are random names, which nobody can predict. A text of a
story or table may be asked more than one question, so that a row has more answers. Row
n is a function of the seed and of n, so no row repeats and resuming needs n. Texts of
stories and tables are new in each; sums and words are few and come again.

Beside the task families rows hold exercises, which no study asks (`exercises.py`).
"""

import random
from collections.abc import Iterator, Mapping

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.training.data import CHUNK, Batch, check_length
from moe_edge.training.exercises import EXERCISES
from moe_edge.training.generators import FAMILIES, READINGS, Example, examples

ANSWER = "\nAnswer:"
# Rows of a family in a cycle. Stories and tables are looked up in the text, which takes
# the longest to learn.
MIX = {"copies": 3, "arithmetic": 1, "words": 1, "stories": 3, "tables": 3}
MOST_ASKED = 8  # questions on one text
ONE_ASKED = 0.25  # share of the texts with one question, as studies ask
_TRAINED, _ASKED = "taught", "taught-held-out"  # seeds that nothing else has
_PADDED = 64  # held-out rows are whole multiples of it


def parse_mix(text: str) -> dict[str, int]:
    """Rows of each family or exercise in a cycle, from "stories=3,tables=1".

    Raises:
      ConfigError: an unknown family, one that is named twice, no whole number, or
        exercises alone.
    """
    mix: dict[str, int] = {}
    for part in text.split(","):
        family, _, rows = (piece.strip() for piece in part.partition("="))
        check_known("task family", family, FAMILIES | EXERCISES)
        if not (rows.isascii() and rows.isdigit() and 0 < int(rows) <= 100):
            raise ConfigError(
                f"mix has {part.strip()!r}, expected FAMILY=ROWS with 1 to 100 rows, "
                "such as stories=3"
            )
        if family in mix:
            raise ConfigError(f"mix names {family} twice; name it once")
        mix[family] = int(rows)
    if mix.keys() <= EXERCISES.keys():
        raise ConfigError(f"mix has {text!r} alone, expected a task family, too")
    return mix


class Document:
    """Examples one after the other, and where their answers stand.

    Attributes:
      text: all of it.
      answers: (first, last) character of each: the space before it, the line's end.
    """

    def __init__(self):
        self.text = ""
        self.answers: list[tuple[int, int]] = []

    def add(self, example: Example) -> None:
        """Adds an example and its answer."""
        begin = len(self.text) + len(example.question) + len(ANSWER)
        self.text += f"{example.question}{ANSWER} {example.answer}\n\n"
        self.answers.append((begin, len(self.text) - 2))

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Tokens, and for each the number of its answer from 1, or 0."""
        encoding = tokenizer.encode(self.text, add_special_tokens=False)
        of_character = np.zeros(len(self.text), np.int32)
        for i, (first, last) in enumerate(self.answers):
            of_character[first : last + 1] = i + 1
        starts = [first for first, _ in encoding.offsets]
        return encoding.ids, of_character[starts].tolist()


def _examples(family: str, rng: random.Random) -> Iterator[Example]:
    """Examples without end; of one text one or up to `MOST_ASKED`, all different."""
    if family not in READINGS:
        draw = (FAMILIES | EXERCISES)[family]
        while True:
            yield draw(rng)
    while True:
        reading = READINGS[family](rng)
        count = 1 if rng.random() < ONE_ASKED else MOST_ASKED
        drawn = (reading.ask(rng) for _ in range(count))
        asked = list(dict.fromkeys(drawn))
        yield asked[0]._replace(question=f"{reading.text}\n{asked[0].question}")
        yield from asked[1:]


class TaskRows:
    """Rows of questions, without end (`data.Source`).

    Args:
      mix: rows of each family in a cycle.
      seed: of all rows.
    Attributes:
      position: rows drawn.
    """

    def __init__(self, tokenizer: Tokenizer, mix: Mapping[str, int], seed: int):
        self._tokenizer, self._seed = tokenizer, seed
        self._cycle: list[str] = []
        total, left = sum(mix.values()), dict.fromkeys(mix, 0)
        for n in range(1, total + 1):  # by largest deficit
            family = max(mix, key=lambda f: mix[f] * n - left[f] * total)
            left[family] += 1
            self._cycle.append(family)
        self.position = 0

    def skip_to(self, position: int) -> None:
        """Moves to a position."""
        self.position = position

    def family(self, n: int) -> str:
        """Of row n."""
        return self._cycle[n % len(self._cycle)]

    def row(self, n: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Row n: int32 [length + 1] tokens, and whether each belongs to an answer."""
        family = self.family(n)
        rng = random.Random(f"{family}/{_TRAINED}-{self._seed}-{n}")
        document, drawn = Document(), _examples(family, rng)
        ids: list[int] = []
        while len(ids) <= length:
            wanted = len(document.text) + 2 * length
            while len(document.text) < wanted:
                document.add(next(drawn))
            ids, answers = document.encode(self._tokenizer)
        taken = slice(length + 1)
        return np.array(ids[taken], np.int32), np.array(answers[taken]) > 0

    def next_batch(self, chunks: int, length: int) -> Batch:
        """`chunks * CHUNK` tokens in rows of `length`; answers alone have weight.

        Every row has the same, so that `mix` says how much a family counts: a row of
        sums has three times as many answers as one of stories.
        """
        check_length(length)
        first, count = self.position, chunks * CHUNK // length
        self.position += count
        rows, answers = zip(
            *(self.row(n, length) for n in range(first, self.position)), strict=True
        )
        weights = np.stack(answers)[:, 1:].astype(np.float32)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1)
        return Batch(np.stack(rows), weights)


def held_out_questions(
    tokenizer: Tokenizer, family: str, seed: int, count: int
) -> Batch:
    """Questions of another seed, each behind a solved one, as studies ask them.

    No row has the texts of stories and tables; sums and words may be in one.

    Returns:
      `count` padded rows; the second answer alone has weight.
    """
    both, found = examples(family, f"{_ASKED}-{seed}", 2 * count), []
    for solved, asked in zip(both[::2], both[1::2], strict=True):
        document = Document()
        document.add(solved)
        document.add(asked)
        document.text += "What"  # so that the line ends as it does between examples
        ids, answers = document.encode(tokenizer)
        found.append((ids, [float(answer == 2) for answer in answers]))
    longest = max(len(ids) for ids, _ in found)
    width = -(-longest // _PADDED) * _PADDED + 1
    rows = np.zeros((count, width), np.int32)
    weights = np.zeros((count, width), np.float32)
    for i, (ids, answers) in enumerate(found):
        rows[i, : len(ids)], weights[i, : len(ids)] = ids, answers
    return Batch(rows, weights[:, 1:])
