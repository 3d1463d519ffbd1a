"""Asks the model and its lossy forms the same questions, and counts right answers."""

import contextlib
from collections.abc import Iterator

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.core.progress import say
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.multiple_choice import wilson_interval
from moe_edge.metrics.frames import Estimate, Rows, interval
from moe_edge.studies.composition.quality import (
    BATCH,
    NEW_TOKENS,
    answered,
    questions,
)
from moe_edge.studies.default_model.tasks import RESIDENT, TaskSettings
from moe_edge.training.generators import FAMILIES

HALF_95 = 1.96  # standard errors of a mean that half of its 95 % interval has


def measure(settings: TaskSettings, rows: Rows) -> None:
    """Right answers of every family, and the change by each lossy form."""
    asked = questions(settings.questions, settings.seed, of="default-tasks")
    loaded = load_engine(settings.checkpoint)
    families_Q = np.array([question.family for question in asked])
    longest = max(len(loaded.tokenizer.encode(one.prompt, end=False)) for one in asked)
    right = {}
    for what, engine in engines(settings, loaded.engine, longest + NEW_TOKENS):
        with engine as one:
            right[what] = answered(one, loaded.tokenizer, asked)
        say(f"{what}: {right[what].mean():.3f} of {len(asked)} questions right")
    for what, right_Q in right.items():
        for family in FAMILIES:
            here_Q = families_Q == family
            found = told(what, right_Q[here_Q], right[RESIDENT][here_Q])
            rows("answers", family, what, **found)
        rows("over_all", what, **told(what, right_Q, right[RESIDENT]))
    named = loaded.name, loaded.engine.weights, loaded.dtype
    fields = ("questions", "k", "margins", "budget", "seed")
    workload = {field: getattr(settings, field) for field in fields}
    rows.about |= {
        "model": describe_model(*named),
        "workload": workload | {"batch": BATCH},
        "seeds": [settings.seed],
        "baselines": [RESIDENT],
    }


def engines(
    settings: TaskSettings, resident, capacity: int
) -> Iterator[tuple[str, contextlib.AbstractContextManager]]:
    """The model, with fewer experts a token, and with SMoE's substitution."""
    own = resident.config.moe.top_k
    yield RESIDENT, contextlib.nullcontext(resident)
    yield (
        f"{settings.k} of {own} experts",
        contextlib.nullcontext(resident.at_k(settings.k)),
    )
    for a in settings.margins:
        options = OffloadOptions(
            device_memory=settings.budget,
            mode="layered",
            eviction="smoe_score",
            route="substitute",
            route_options={"a": a},
        )
        room = {"batch": BATCH, "capacity": capacity, "with_tokenizer": False}
        yield (
            f"SMoE, a = {a:g}",
            load_engine(settings.checkpoint, offload=options, **room).engine,
        )


def told(what: str, right_Q: np.ndarray, own_Q: np.ndarray) -> dict[str, Estimate]:
    """The share that is right, and its change: the same questions, in pairs."""
    n, found = len(right_Q), {}
    share = float(right_Q.mean())
    found["right"] = interval(share, wilson_interval(int(right_Q.sum()), n), n)
    if what != RESIDENT:
        change_Q = right_Q.astype(float) - own_Q
        mean, half = change_Q.mean(), HALF_95 * change_Q.std(ddof=1) / np.sqrt(n)
        found["change"] = interval(mean, (mean - half, mean + half), n)
    return found
