"""Questions that only teach: no study asks them, as their answers stand in them.

A model that looks up in a text must copy from it first. Of a question on a story some
tokens are learnt; of a copy a whole line.
"""

import random
from collections.abc import Callable

from moe_edge.training.generators import (
    CITIES,
    COLOURS,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
    WORDS,
    Example,
)

_COPIED = (*WORDS, *NAMES, *THINGS, *PLACES, *COLOURS, *JOBS, *CITIES)


def copies(rng: random.Random) -> Example:
    """Words or numbers to repeat, or pairs to repeat in another order."""
    kind = rng.randrange(3)
    if kind == 0:
        text = " ".join(rng.choices(_COPIED, k=rng.randint(4, 24)))
    elif kind == 1:
        text = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(3, 12)))
    else:
        names = rng.sample(NAMES, rng.randint(2, 8))
        pairs = [f"{name} {rng.choice(_COPIED)}" for name in names]
        asked = rng.sample(pairs, len(pairs))
        return Example(f"{', '.join(pairs)}\nIn another order:", ", ".join(asked))
    return Example(f"Repeat: {text}", text)


EXERCISES: dict[str, Callable[[random.Random], Example]] = {"copies": copies}
