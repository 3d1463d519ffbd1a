"""Policies beside each other: the same prompts, in rounds, against the resident engine.

The order of the cases turns with every round, and compilation counts for none. The
resident engine runs in a process of its own, where no setting or slot of the others
slows it.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.figures import picture
from moe_edge.core.json_reader import parse_json
from moe_edge.core.plug_in import Registry, is_object
from moe_edge.core.progress import progress
from moe_edge.evaluate.stepwise import Forced, score_batches
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.predict.base import PREDICTORS
from moe_edge.public.arguments import OFFLOAD_HINTS, refuse_unknown
from moe_edge.public.engine import Engine
from moe_edge.public.model import OPTIONS, Model, load
from moe_edge.route.base import ROUTES

if TYPE_CHECKING:
    import pandas

PROMPTS = (
    "Once upon a time there was a fox who",
    "The captain looked at the sea and said",
    "It was a cold morning in the city when",
)
_KINDS = {
    "eviction": EVICTIONS,
    "predictor": PREDICTORS,
    "route": ROUTES,
}
_CHILD = """import json, sys
sys.path = json.loads(sys.argv[1])
from moe_edge.public.resident_run import main
main()"""
_SPEEDS = ("tokens_per_s", "tpot_s")


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
    **options,
) -> "pandas.DataFrame":
    """A table of every eviction with every predictor, route and budget.

    The engines of all cases are alive together, since rounds turn: their budgets must
    fit the device in sum. Where the resident engine's process fails, mostly for want of
    memory (on a GPU this process may have taken most: set
    XLA_PYTHON_CLIENT_PREALLOCATE=false), its row has no numbers, stderr says why, and
    the first lossless case is the reference.

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
      `hit_ratio`, `bytes_moved` a round, and `link`.
    Raises:
      ConfigError, CapacityError, RequestError: as `Model.offload`, `Engine.generate`.
    """
    known = [name for name in OPTIONS if name not in _KINDS]
    unknown = [name for name in options if name not in known]
    refuse_unknown("compare", unknown, known, OFFLOAD_HINTS)
    check_count("rounds", rounds)
    check_count("max_new_tokens", max_new_tokens)
    model = model if isinstance(model, Model) else load(model)
    lists = {"budgets": budgets, "evictions": evictions}
    lists |= {"predictors": predictors, "routes": routes}
    cases = [*itertools.product(*(_listed(*item) for item in lists.items()))]
    engines: list[Engine] = []
    try:
        for budget, *given in cases:
            named = dict(zip(_KINDS, given, strict=True))
            engines.append(model.offload(budget, **named, **options))
        rows = [engines[0].ids(prompt) for prompt in _listed("prompts", prompts)]
        resident = _try_resident(model, rows, max_new_tokens, rounds, engines)
        firsts = [_generate(engine, rows, max_new_tokens)[0] for engine in engines]
        tokens = resident["tokens"]
        if tokens is None:
            pairs = zip(engines, firsts, strict=True)
            tokens = next(first for engine, first in pairs if engine.lossless)
        found: list[list[dict]] = [[] for _ in engines]
        for turn in progress(range(rounds), "rounds compared"):
            for i in range(len(engines)):
                at = (i + turn) % len(engines)
                engines[at].reset()
                found[at].append(_generate(engines[at], rows, max_new_tokens)[1])
        table = [
            {"budget": "resident", **dict.fromkeys(_KINDS, "")}
            | resident["same"]
            | _summary(resident["rounds"])
            | {"link": ""}
        ]
        for case, engine, first, stats in zip(
            cases, engines, firsts, found, strict=True
        ):
            labels = [
                label(_KINDS[name], given, options.get(f"{name}_options"))
                for name, given in zip(_KINDS, case[1:], strict=True)
            ]
            table.append(
                {"budget": str(case[0]), **dict(zip(_KINDS, labels, strict=True))}
                | {"tokens_equal": first == tokens}
                | {"agreement": _agreement(engine, rows, tokens)}
                | _summary(stats)
                | {"link": engine.link}
            )
    finally:
        for engine in engines:
            engine.close()
    import pandas  # takes a second, which a refused value need not wait for

    return pandas.DataFrame(table)


def plot(table: "pandas.DataFrame", path: str | Path = "compare.png") -> Path:
    """Draws a table of `compare` into a PNG file: tokens a second of every case.

    Returns:
      the path of the file.
    """
    path, labels = Path(path), _labels(table)
    rate = table["tokens_per_s"].to_numpy(float)
    low, high = (
        table[f"tokens_per_s_{end}"].to_numpy(float) for end in ("low", "high")
    )
    size = (7.0, 1.0 + 0.4 * len(labels))
    with picture(path, "Decoding, tokens a second", figsize=size) as (_, axes):
        places = np.arange(len(labels))  # cases may have the same label
        axes.barh(places, rate, xerr=np.stack([rate - low, high - rate]), capsize=3)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s (median of the rounds; whiskers: least and most)")
    return path


def label(
    registry: Registry, given: Any, options: Mapping[str, Any] | None = None
) -> str:
    """A policy's name with its options; an object's that are not its class's own.

    Args:
      options: of a name or a class (`eviction_options`, ...).
    """
    kind, values = registry.class_of(given), dict(options or {})
    if is_object(given) and dataclasses.is_dataclass(given):
        values = {
            field.name: getattr(given, field.name)
            for field in dataclasses.fields(given)
            if field.init and field.repr and field.compare
            if not _is_default(field, given)
        }
    said = [f"{name}={value!r:.20}" for name, value in values.items()]
    return f"{kind.name}({', '.join(said)})" if said else kind.name


def _is_default(field: dataclasses.Field, given: Any) -> bool:
    value, default = getattr(given, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return value is default or repr(value) == repr(default)


def _labels(table) -> list[str]:
    """Budget, policies that differ between cases, and the hit ratio."""
    names = [name for name in _KINDS if table[name].nunique() > 2] or ["eviction"]
    labels = []
    for _, row in table.iterrows():
        ratio = row["hit_ratio"]
        known = ratio is not None and not np.isnan(ratio)
        hits = f"({ratio:.0%} hits)" if known else ""
        parts = row["budget"], *(row[name] for name in names), hits
        labels.append(" ".join(part for part in parts if part))
    return labels


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)) and given:
        return list(given)
    raise ConfigError(f"{name} is {given!r:.60}, expected a list with something in it")


def _generate(engine: Engine, rows, max_new_tokens: int) -> tuple[list, dict[str, Any]]:
    """New tokens of each prompt, one after another, and the statistics of all."""
    outs = [engine.generate(ids, max_new_tokens, ignore_eos=True) for ids in rows]
    return [out.tokens for out in outs], engine.stats()


def _agreement(engine: Engine, rows, tokens) -> float:
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


def _try_resident(model: Model, rows, max_new_tokens: int, rounds: int, engines):
    """As `run_resident`, and `same`; with nothing in it where that process fails.

    Raises:
      ConfigError: it fails, and no engine here gives the same tokens.
    """
    try:
        found = run_resident(model, rows, max_new_tokens, rounds)
    except ConfigError as error:
        if not any(engine.lossless for engine in engines):
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


def run_resident(
    model: Model, rows, max_new_tokens: int, rounds: int
) -> dict[str, Any]:
    """The resident engine's tokens and rounds, from a process of its own.

    Not by `multiprocessing`, which would run a caller's script again.
    """
    asked = {"checkpoint": model.source, "rows": [list(map(int, ids)) for ids in rows]}
    asked |= {"max_new_tokens": max_new_tokens, "rounds": rounds}
    # Modules come from where this process has them; not from the working directory.
    paths = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, json.dumps(paths)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ConfigError(
            f"the process of the resident engine ended with exit code "
            f"{done.returncode}; what it printed stands above"
        )
    return parse_json("answer of the resident engine", done.stdout, ConfigError)
