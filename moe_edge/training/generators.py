"""Task families written by a generator: arithmetic, words, stories, tables.

Every example is a question and a short answer; a document is several examples of one
family, "...\nAnswer: ...". Plain Python, deterministic by seed: training, held-out
and other uses take different seeds. Nothing is taken from any evaluation set.
"""

import json
import random
from collections.abc import Callable
from typing import NamedTuple

from moe_edge.core.checks import check_known


class Example(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str


class Reading(NamedTuple):
    """A text, and what draws a question on it."""

    text: str
    ask: Callable[[random.Random], Example]

    def example(self, rng: random.Random) -> Example:
        """The text with one question."""
        question, answer = self.ask(rng)
        return Example(f"{self.text}\n{question}", answer)


NAMES = "Anna Ben Clara David Ella Felix Grace Hugo Iris Jack Kate Leo Mia Noah".split()
NAMES += "Olga Paul Rosa Sam Tina Victor Wendy Yusuf Zoe Omar".split()
THINGS = (
    "apple book key lamp coin map ring cup ball hat letter bell rope candle".split()
)
THINGS += "basket stone shell brush clock spoon".split()
PLACES = (
    "kitchen garden cellar attic library market station harbour school barn".split()
)
PLACES += "workshop bakery tower".split()
COLOURS = "red blue green yellow white black brown grey purple orange".split()
WORDS = (
    "river stone cloud bread table window garden silver yellow music winter summer "
    "planet bridge forest letter orange basket castle dragon engine feather guitar "
    "hammer island jacket kettle ladder market needle ocean pencil quartz ribbon "
    "saddle tunnel umbrella valley wagon yarn zebra apple butter candle desert eagle "
    "flower ginger honey insect jungle kitten lemon mirror nickel olive pepper rabbit "
    "school tiger uncle velvet whale acorn beetle copper dolphin fabric goblet harbor "
    "ivory jewel kernel lantern marble napkin oyster parrot rocket salmon timber"
).split()
JOBS = "baker farmer doctor pilot tailor sailor painter teacher miner cook".split()
CITIES = (
    "Oslo Lima Cairo Delhi Paris Quito Rome Tokyo Vienna Zagreb Dakar Perth".split()
)


def arithmetic(rng: random.Random) -> Example:
    """Sums, differences, products, quotients, comparisons, small word problems."""
    top = rng.choice((9, 20, 99, 99, 999))
    a, b = rng.randint(0, top), rng.randint(0, top)
    kind = rng.randrange(7)
    if kind == 0:
        ask = rng.choice(("What is {} plus {}?", "{} + {} =", "Add {} and {}."))
        return Example(ask.format(a, b), str(a + b))
    if kind == 1:
        a, b = max(a, b), min(a, b)
        ask = rng.choice(("What is {} minus {}?", "{} - {} =", "Subtract: {} - {}."))
        return Example(ask.format(a, b), str(a - b))
    if kind == 2:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        ask = rng.choice(("What is {} times {}?", "{} * {} =", "Multiply {} by {}."))
        return Example(ask.format(a, b), str(a * b))
    if kind == 3:
        a, b = rng.randint(1, 12), rng.randint(1, 12)
        ask = rng.choice(("What is {} divided by {}?", "{} / {} ="))
        return Example(ask.format(a * b, b), str(a))
    if kind == 4:
        word = rng.choice(("larger", "smaller"))
        pick = max(a, b) if word == "larger" else min(a, b)
        return Example(f"Which number is {word}, {a} or {b}?", str(pick))
    if kind == 5:
        step, start = rng.randint(1, 9), rng.randint(0, 30)
        row = ", ".join(str(start + i * step) for i in range(4))
        return Example(f"What comes next: {row}, ...?", str(start + 4 * step))
    who, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, 30), rng.randint(1, 20)
    if rng.random() < 0.5:
        text = f"{who} has {a} {thing}s and gets {b} more. How many {thing}s now?"
        return Example(text, str(a + b))
    a, b = max(a, b), min(a, b)
    text = f"{who} has {a} {thing}s and gives away {b}. How many {thing}s are left?"
    return Example(text, str(a - b))


def words(rng: random.Random) -> Example:
    """Reverse, spell, count letters, sort words, first and last letters, pictures."""
    word = rng.choice(WORDS)
    kind = rng.randrange(8)
    if kind == 0:
        return Example(f"Spell the word '{word}'.", " ".join(word))
    if kind == 1:
        return Example(
            f"Reverse the letters: {' '.join(word)}", " ".join(reversed(word))
        )
    if kind == 2:
        letter = rng.choice(word)
        ask = f"How many times does '{letter}' occur in {' '.join(word)}?"
        return Example(ask, str(word.count(letter)))
    if kind == 3:
        chosen = rng.sample(WORDS, rng.randint(3, 5))
        return Example(
            f"Sort by alphabet: {' '.join(chosen)}", " ".join(sorted(chosen))
        )
    if kind == 4:
        end = rng.choice(("first", "last"))
        letter = word[0] if end == "first" else word[-1]
        return Example(f"What is the {end} letter of '{word}'?", letter)
    if kind == 5:
        chosen = rng.sample(WORDS, rng.randint(3, 6))
        return Example(f"How many words: {' '.join(chosen)}?", str(len(chosen)))
    if kind == 6:
        mark, length = rng.choice("#*+=o"), rng.randint(2, 6)
        rows = [mark * length] * rng.randint(1, 4)
        side = rng.choice(("rows", "columns"))
        count = len(rows) if side == "rows" else length
        return Example("\n".join(rows) + f"\nHow many {side}?", str(count))
    odd = rng.sample(WORDS, 2)
    row = [odd[0]] * rng.randint(2, 4)
    row.insert(rng.randint(0, len(row)), odd[1])
    return Example(f"Which word is different: {' '.join(row)}?", odd[1])


def stories(rng: random.Random) -> Example:
    """A few sentences about people, things and places, and a question on them."""
    return story(rng).example(rng)


def story(rng: random.Random) -> Reading:
    """The sentences, with seven questions on them."""
    one, two, three = rng.sample(NAMES, 3)
    thing, other = rng.sample(THINGS, 2)
    place, away, far = rng.sample(PLACES, 3)
    colour, job = rng.choice(COLOURS), rng.choice(JOBS)
    openings = (
        f"Once there was a {job} named {one} who lived near the {far}.",
        f"{one} was a {job} who liked to walk to the {far}.",
        f"Long ago, {one} the {job} had a friend called {three}.",
        f"It was a cold morning when {one}, the {job}, met {three} at the {far}.",
    )
    finds = (
        f"One day {one} found a {colour} {thing} in the {place}.",
        f"In the {place}, {one} saw a {colour} {thing} on the floor.",
        f"A {colour} {thing} was lying in the {place}, and {one} picked it up.",
    )
    moves = (
        f"{one} gave the {thing} to {two}, who carried it to the {away}.",
        f"Then {two} asked for the {thing}, took it and went to the {away}.",
        f"{two} bought the {thing} from {one} and put it in the {away}.",
    )
    ends = (
        f"In the evening {three} came with a {other} and they all laughed.",
        f"{three} only had an old {other} and went home early.",
        "Nobody spoke of it again.",
        "That night it rained, and everyone slept well.",
    )
    parts = [rng.choice(choices) for choices in (openings, finds, moves, ends)]
    questions = (
        (f"Where was the {thing} found?", f"in the {place}"),
        (f"Where is the {thing} now?", f"in the {away}"),
        (f"Who has the {thing} now?", two),
        (f"What colour was the {thing}?", colour),
        (f"Who was the {job}?", one),
        (f"What did {one} find?", f"a {colour} {thing}"),
        (f"What is the work of {one}?", job),
    )

    def ask(rng: random.Random) -> Example:
        question, answer = rng.choice(questions)
        return Example(f"Question: {question}", answer)

    return Reading(" ".join(parts), ask)


def tables(rng: random.Random) -> Example:
    """Look-ups in JSON, CSV and pipe tables of people or goods."""
    return table(rng).example(rng)


def table(rng: random.Random) -> Reading:
    """A table, with look-ups, and questions on its rows' number and extremes."""
    if rng.random() < 0.5:
        keys = ("name", "age", "city", "job")
        names = rng.sample(NAMES, rng.randint(2, 4))
        rows = [
            (n, rng.randint(18, 80), rng.choice(CITIES), rng.choice(JOBS))
            for n in names
        ]
    else:
        keys = ("item", "price", "count", "colour")
        goods = rng.sample(THINGS, rng.randint(2, 4))
        rows = [
            (g, rng.randint(1, 60), rng.randint(0, 99), rng.choice(COLOURS))
            for g in goods
        ]
    kind = rng.randrange(4)
    if kind == 0:
        text = json.dumps([dict(zip(keys, row, strict=True)) for row in rows])
    elif kind == 1:
        text = json.dumps(
            {row[0]: dict(zip(keys[1:], row[1:], strict=True)) for row in rows},
            indent=1,
        )
    else:
        mark = "," if kind == 2 else " | "
        text = "\n".join(mark.join(map(str, row)) for row in (keys, *rows))

    def ask(rng: random.Random) -> Example:
        row, column = rng.choice(rows), rng.randrange(1, len(keys))
        kind = rng.randrange(4)
        if kind == 0:
            return Example("How many rows?", str(len(rows)))
        if kind == 1:
            high = rng.random() < 0.5
            best = (max if high else min)(rows, key=lambda row: row[1])
            most = "highest" if high else "lowest"
            return Example(f"Which {keys[0]} has the {most} {keys[1]}?", str(best[0]))
        return Example(f"What is the {keys[column]} of {row[0]}?", str(row[column]))

    return Reading(text, ask)


FAMILIES: dict[str, Callable[[random.Random], Example]] = {
    "arithmetic": arithmetic,
    "words": words,
    "stories": stories,
    "tables": tables,
}
# Those whose questions are on a text, which can be asked more than one.
READINGS: dict[str, Callable[[random.Random], Reading]] = {
    "stories": story,
    "tables": table,
}


def examples(family: str, seed: str | int, count: int) -> list[Example]:
    """`count` examples of a family; the same seed gives the same list.

    Raises:
      ConfigError: unknown family.
    """
    check_known("task family", family, FAMILIES)
    rng = random.Random(f"{family}/{seed}")
    return [FAMILIES[family](rng) for _ in range(count)]


def documents(family: str, seed: str | int, characters: int) -> list[str]:
    """Documents of 2 to 6 examples until `characters` are written."""
    check_known("task family", family, FAMILIES)
    rng = random.Random(f"{family}/{seed}")
    written, result = 0, []
    while written < characters:
        batch = [FAMILIES[family](rng) for _ in range(rng.randint(2, 6))]
        text = "\n\n".join(f"{e.question}\nAnswer: {e.answer}" for e in batch)
        result.append(text)
        written += len(text)
    return result
