"""One driver for all studies: settings in, a measurement, a results entry out.

A study is a `Study` value named like its entry (`results/NAME`), its gin file
(`configs/experiments/NAME.gin`) and its argument of `moe-edge study`; `registry.py`
lists them all.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.run_folder import RunFolder, documented, unpacked
from moe_edge.metrics.frames import Frame, Rows, Tables
from moe_edge.metrics.index import head_of
from moe_edge.metrics.page import question_of
from moe_edge.metrics.results import (
    Findings,
    check_clean,
    write_entry,
    write_rows,
)
from moe_edge.metrics.schema import check_answer

if TYPE_CHECKING:
    from moe_edge.bench.starts import Plan


def nothing_derived(tables: Tables) -> Mapping[str, Any]:
    """A study whose page shows its rows alone."""
    return {}


def nothing_to_check(settings: Any) -> None:
    """A study whose settings check themselves."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A question, and how it is answered.

    Attributes:
      name: of the entry, the gin file, the page's template and the root in gin.
      settings: frozen dataclass of keywords, the committed sizes as defaults; checks
        its fields and holds only what this study reads.
      measure: runs the study, adding rows to the frames; `later` where its module
        loads JAX.
      frames: by name, those that it fills. Without: `measure` returns `Findings`.
      derive: tables of the frames -> numbers that the page names, and its `checks`.
      check: refuses what can be refused before weights are read (for --dry_run).
      inline: it times offloaded engines, and others only beside them: programs run in
        the thread that calls them, as where users load one (`engine/inline.py`).
      start: settings of one of its starts at most (`starts.py`), a round as a rule;
        None keeps what is given, where each start had another seed otherwise.
      partial: frames of which a start may lack rows; those of all starts are joined.
      question: of a study that returns `Findings`; otherwise it stands in the template.
    """

    name: str
    settings: type
    measure: Callable[..., Findings | None]
    frames: Mapping[str, Frame] = dataclasses.field(default_factory=dict)
    derive: Callable[[Tables], Mapping[str, Any]] = nothing_derived
    _: dataclasses.KW_ONLY
    question: str = ""
    check: Callable[[Any], None] = nothing_to_check
    inline: bool = False
    start: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"rounds": 1})
    partial: Collection[str] = ()

    @property
    def asks(self) -> str:
        """What the entry asks."""
        return self.question or question_of(self.name)


def run_study(
    study: Study,
    settings: Any,
    *,
    out_dir: str,
    overwrite: bool = False,
    dry_run: bool = False,
    allow_dirty: bool = False,
    starts: int | None = None,
    append: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Runs a study with an instance of its `settings` and writes its entry.

    Args:
      out_dir: folder of the entry.
      overwrite: replace a non-empty `out_dir`.
      dry_run: check and stop.
      allow_dirty: write into the committed `results/` from changed sources.
      starts: measure in so many fresh processes, of a round each.
      append: add them to those of the entry.
      config_text: gives the config to store.
    Returns:
      {name, answer, out_dir, checks} and what the findings add.
    Raises:
      MoeEdgeError: bad input; nothing was written.
    """
    started_s = time.time()
    run = RunFolder(out_dir, overwrite or append, dry_run, config_text)
    check_clean(out_dir, allow_dirty)
    plan = _plan(study, settings, out_dir, starts, append)
    if study.inline:
        from moe_edge.engine.inline import run_inline  # JAX, which others check without

        run_inline()
    _check(study, settings, plan)
    if dry_run:
        from moe_edge.kernels import native  # JAX, which checks do without

        planned = {"name": study.name, "out_dir": out_dir}
        return {"dry_run": True, **planned, "kernels": native.describe()}
    with run.taken():  # before anything is measured
        if study.frames:
            found = _rows(study, settings, plan)
            summary = _rows_measured(study, found, run, started_s)
            if plan and plan.kept:
                plan.kept.unlink(missing_ok=True)  # the entry holds them now
            return summary
        return _measured(study, settings, run, started_s)


def _plan(
    study: Study, settings: Any, out_dir: str, starts: int | None, append: bool
) -> "Plan | None":
    """The starts to make, once it is clear that the study can have any."""
    if starts is None:
        if append:
            raise ConfigError("append adds starts to an entry; say how many by starts")
        return None
    from moe_edge.bench.starts import of_start, planned  # which import this module

    check_count("starts", starts)
    of_start(study, settings, 0)
    return planned(study, settings, out_dir, starts, append)


def _check(study: Study, settings: Any, plan: "Plan | None") -> None:
    """Refuses what the study refuses, of every start that is to be made."""
    if plan is None:
        study.check(settings)
        return
    from moe_edge.bench.started import started
    from moe_edge.bench.starts import next_try, of_start

    for number in range(next_try(plan.made), plan.until):
        with started(number):
            study.check(of_start(study, settings, number))


def _rows(
    study: Study, settings: Any, plan: "Plan | None"
) -> tuple[Rows, dict[str, Any] | None]:
    """What the study measures, and what an entry says of its starts."""
    if plan is None:
        rows = Rows(study.frames)
        study.measure(settings, rows)
        return rows, None
    from moe_edge.bench.joined import join
    from moe_edge.bench.starts import facts_of, take_starts, used
    from moe_edge.bench.starts_file import FILE, stored_text

    found = take_starts(study, settings, plan)
    joined = join(study, used(found))
    joined.rows.files[FILE] = stored_text(settings, found)
    each = facts_of(found)
    return joined.rows, {"each": each, "intervals": joined.intervals}


def _measured(
    study: Study, settings: Any, run: RunFolder, started_s: float
) -> dict[str, Any]:
    """Measures and writes the entry; returns the summary."""
    out_dir = run.out_dir
    found = study.measure(settings)
    print(f"{study.question}\n{found.answer}")
    try:
        check_answer(found.answer)
    except ConfigError as error:  # a measurement is not thrown away for its words
        print(f"note: {error}")
    for check, passed in found.checks.items():
        print(f"{check}: {'yes' if passed else 'NO'}")
    write_entry(
        out_dir,
        found,
        question=study.question,
        config_text=run.config_text(),
        started_s=started_s,
        overwrite=run.overwrite,
    )
    shown = ("README.md", "plot.png", *found.pictures)
    print("Results and pictures: " + ", ".join(f"{out_dir}/{name}" for name in shown))
    summary = {"name": study.name, "answer": found.answer, "out_dir": out_dir}
    return {**summary, "checks": dict(found.checks), **found.summary}


def _rows_measured(
    study: Study,
    found: tuple[Rows, dict[str, Any] | None],
    run: RunFolder,
    started_s: float,
) -> dict[str, Any]:
    """`_measured` of a study that filled frames."""
    rows, starts = found
    result = write_rows(
        run.out_dir,
        study.name,
        rows,
        study.derive,
        starts=starts,
        config_text=run.config_text(),
        started_s=started_s,
        overwrite=run.overwrite,
    )
    page = (Path(run.out_dir) / "README.md").read_text(encoding="utf-8")
    question, answer = head_of(page)
    print(f"{question}\n{answer}")
    for check, passed in result["checks"].items():
        print(f"{check}: {'yes' if passed else 'NO'}")
    print(f"Results and pictures: {run.out_dir}/README.md")
    summary = {"name": study.name, "answer": answer, "out_dir": run.out_dir}
    return {**summary, "checks": result["checks"], "numbers": result["numbers"]}


def study_root(study: Study) -> Callable[..., dict[str, Any]]:
    """The study as a root for gin: its settings' fields and those of `run_study`."""
    root = unpacked(settings=study.settings)(functools.partial(run_study, study))
    root.__name__ = root.__qualname__ = study.name
    root.__doc__ = documented(study.asks, study.settings)
    return root


def weights_of(checkpoint: str) -> str:
    """What an entry says of a checkpoint's weights."""
    return "toy trained here" if checkpoint == "default" else "given"


def mean_change(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean of new / old - 1 over (old, new), as the paper averages over settings.

    Pairs that start from 0 have no relative change and are left out; 0 if all do.
    """
    found = [new / old - 1 for old, new in pairs if old]
    return float(np.mean(found)) if found else 0.0
