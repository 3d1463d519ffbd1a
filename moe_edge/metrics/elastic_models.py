"""Makes the refactored models that a study compares: profile, gates, fine-tuning.

What exists in the work folder is used again, and a run that was stopped goes on: each
step is one of the project's own, which appears as a whole or resumes.
"""

import dataclasses
import json
from pathlib import Path

from moe_edge.evaluate.texts import find_path
from moe_edge.metrics.elastic_settings import ElasticSettings
from moe_edge.profile.run_profile import run_profile
from moe_edge.refactor.run_refactor import run_refactor

GATES = ("lg", "cg", "lg_ft")


def make_models(settings: ElasticSettings) -> ElasticSettings:
    """The settings with a path for each gate in `make`, made in `work_dir` if need be.

    Raises:
      MoeEdgeError: bad input, or a fine-tuning that is not finished.
    """
    if not settings.make:
        return settings
    work = Path(settings.work_dir)
    profile = work / "profile"
    if not (profile / "profile.json").is_file():
        run_profile(
            out_dir=str(profile),
            checkpoint=settings.checkpoint,
            text=",".join(settings.calibration),
            data_dir=settings.data_dir,
            tokens=settings.calibration_tokens,
        )
    found = {}
    for gate in settings.make:
        folder = work / gate
        if not (folder / "manifest.json").is_file():
            options = {}
            if gate == "lg_ft":
                options["train_text"] = ",".join(
                    find_path(name, settings.data_dir) for name in settings.train
                )
                options["fine_tuning"] = dict(settings.fine_tuning)
            run_refactor(
                out_dir=str(folder),
                checkpoint=settings.checkpoint,
                profile=str(profile),
                gate=gate,
                ppl_k="",
                **options,
            )
        found[gate] = str(folder)
    return dataclasses.replace(settings, **found)


def provenance(settings: ElasticSettings) -> dict:
    """How the compared models came about, from their reports, for the entry."""
    found = {}
    for gate in GATES:
        path = getattr(settings, gate)
        report = None if path is None else Path(path) / "report.json"
        if report is not None and report.is_file():
            known = json.loads(report.read_text(encoding="utf-8"))
            found[gate] = {
                key: known[key]
                for key in ("gate", "objective", "objective_heldout", "fine_tuning")
                if key in known
            }
    return found
