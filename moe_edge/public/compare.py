"""Policies beside each other: the same prompts, in rounds, against the resident engine.

The order of the cases turns with every round, and compilation counts for none.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.progress import progress
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.public.arguments import COMPARE_HINTS, refuse_unknown
from moe_edge.public.case_engines import CaseEngines
from moe_edge.public.engine import Engine
from moe_edge.public.labels import label, listed
from moe_edge.public.model import Model, load
from moe_edge.public.options import OPTIONS, PLUG_INS
from moe_edge.public.prompts import PromptReader, Rows
from moe_edge.public.resident_run import run_resident

if TYPE_CHECKING:
    import pandas

PROMPTS = (
    "Once upon a time there was a fox who",
    "The captain looked at the sea and said",
    "It was a cold morning in the city when",
)
_SPEEDS = ("tokens_per_s", "tpot_s")
_ARGUMENTS = (
    *("model", "evictions", "predictors", "routes", "budgets", "prompts", "rounds"),
    "max_new_tokens",
)


def compare(
    model: Model | str | Path = "default",
    *,
    evictions: Sequence[Any] = ("lru",),
    predictors: Sequence[Any] = ("none",),
    routes: Sequence[Any] = ("topk",),
    budgets: Sequence[str | float] = ("25%",),
    prompts: Sequence[Any] = PROMPTS,
    rounds: int = 3,
    max_new_tokens: int = 32,
    **options: Any,
) -> "pandas.DataFrame":
    """A table of every eviction with every predictor, route and budget.

    The resident engine runs first, in a process of its own. On a GPU a process that
    runs a model holds most of the memory, so call `compare` before any engine is made
    (or set XLA_PYTHON_CLIENT_PREALLOCATE=false before Python starts). Where that
    process fails its row has no numbers, stderr says why, and the first lossless case
    is the reference. Engines of all cases are alive together where their slots fit the
    device, else one at a time, which takes longer.

    >>> given = {"budgets": ["25%"], "rounds": 1, "max_new_tokens": 4}
    >>> table = me.compare(model, evictions=["lru", "lfu"], **given)
    >>> print(table[["budget", "eviction", "tokens_equal"]])
         budget eviction  tokens_equal
    0  resident                   True
    1       25%      lru          True
    2       25%      lfu          True

    Args:
      model: of `load`, or what `load` takes.
      evictions, predictors, routes: names, classes or objects.
      budgets: of `device_memory`.
      prompts: texts or token ids, one after another; the same for all cases.
      rounds: of all prompts, each case beginning with empty slots.
      max_new_tokens: of each continuation; end-of-text does not end it.
      **options: more of `Model.offload`, the same for all cases.
    Returns:
      a row a case, and first the resident engine: `budget`, `eviction`, `predictor`,
      `route` (with their options), `tokens_equal` (whether all tokens are
      the resident engine's), `agreement` (share of the resident engine's tokens that
      are the likeliest, each after the resident engine's own text), `tokens_per_s` and
      `tpot_s` (medians of the rounds; with `_low` and `_high` the least and most),
      `hit_ratio`, `bytes_moved` a round, and `link` ("real", or what is emulated).
    Raises:
      ConfigError, CapacityError, RequestError: as `Model.offload`, `Engine.generate`.
    """
    offered = [name for name in OPTIONS if name not in PLUG_INS]
    unknown = [name for name in options if name not in offered]
    refuse_unknown("compare", unknown, (*_ARGUMENTS, *offered), COMPARE_HINTS)
    check_count("rounds", rounds)
    check_count("max_new_tokens", max_new_tokens)
    model = model if isinstance(model, Model) else load(model)
    lists = {"evictions": evictions, "predictors": predictors, "routes": routes}
    lists = {"budgets": budgets} | lists
    cases = []
    for budget, *given in itertools.product(*(listed(*item) for item in lists.items())):
        named = dict(zip(PLUG_INS, given, strict=True)) | options
        cases.append((budget, named))
    # Nothing opens the device before the resident engine has run.
    read = [
        model.options.read("1B" if budget == "auto" else budget, named)
        for budget, named in cases
    ]
    lossless = [i for i, given in enumerate(read) if given.lossless]
    reader = PromptReader(model, None)
    rows = [reader.one(ids, max_new_tokens) for ids in listed("prompts", prompts)]
    resident = _try_resident(model, rows, max_new_tokens, rounds, bool(lossless))
    firsts: dict[int, list] = {}

    def warm_up(case: int, engine: Engine) -> None:
        firsts[case] = _generate(engine, rows, max_new_tokens)[0]

    found: list[list[dict]] = [[] for _ in cases]
    with CaseEngines(model, cases, warm_up) as engines:
        for turn in progress(range(rounds), "rounds compared"):
            for i in range(len(cases)):
                at = (i + turn) % len(cases)
                engine = engines[at]
                engine.reset()
                found[at].append(_generate(engine, rows, max_new_tokens)[1])
        tokens = resident["tokens"]
        if tokens is None:
            tokens = firsts[lossless[0]]
        table = [
            {"budget": "resident", **dict.fromkeys(PLUG_INS, "")}
            | resident["same"]
            | _summary(resident["rounds"])
            | {"link": ""}
        ]
        for case, (budget, named) in enumerate(cases):
            engine = engines[case]
            table.append(
                {"budget": str(budget)}
                | {
                    name: label(kind, named[name], named.get(f"{name}_options"))
                    for name, kind in PLUG_INS.items()
                }
                | {"tokens_equal": firsts[case] == tokens}
                | {"agreement": _agreement(engine, rows, tokens)}
                | _summary(found[case])
                | {"link": engine.link}
            )
    import pandas  # takes a second, which a refused value need not wait for

    return pandas.DataFrame(table)


def _generate(
    engine: Engine, rows: Rows, max_new_tokens: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """New tokens of each prompt, one after another, and the statistics of all."""
    outs = [engine.generate(ids, max_new_tokens, ignore_eos=True) for ids in rows]
    return [out.tokens for out in outs], engine.stats()


def _agreement(engine: Engine, rows: Rows, tokens: Sequence[list[int]]) -> float:
    """Share of the resident tokens that this engine finds likeliest, one by one."""
    pairs = zip(rows, tokens, strict=True)
    forced = [Forced([*ids, *new], len(ids)) for ids, new in pairs]
    best = np.concatenate(score_batches(engine.core, forced, 1).best)
    return float((best == np.concatenate(tokens)).mean())


def _summary(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds, with the range of speeds."""
    found = {}
    for name in _SPEEDS:
        values = [each[name] for each in stats if each[name] is not None]
        for key, of in (("", np.median), ("_low", np.min), ("_high", np.max)):
            found[name + key] = float(of(values)) if values else None
    for name in ("hit_ratio", "bytes_moved"):
        values = [each[name] for each in stats if each[name] is not None]
        found[name] = float(np.median(values)) if values else None
    return found


def _try_resident(
    model: Model, rows: Rows, max_new_tokens: int, rounds: int, has_lossless: bool
) -> dict[str, Any]:
    """As `run_resident`, and `same`; with nothing in it where that process fails.

    Raises:
      ConfigError: it fails, and no engine here gives the same tokens.
    """
    try:
        found = run_resident(model, rows, max_new_tokens, rounds)
    except ConfigError as error:
        if not has_lossless:
            raise ConfigError(
                f"{error}; no case is lossless, so there is nothing to compare with: "
                "add the route topk"
            ) from error
        print(
            f"{error}; row resident stays empty, and the tokens of the first lossless "
            "case take the place of its own",
            file=sys.stderr,
        )
        same = {"tokens_equal": None, "agreement": None}
        return {"tokens": None, "rounds": [], "same": same}
    return found | {"same": {"tokens_equal": True, "agreement": 1.0}}
