"""The whole study on the default model, with few methods and little text."""

import dataclasses

import pytest

from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import tables
from moe_edge.metrics.schema import read_result
from moe_edge.studies.composition import measure, workshop
from moe_edge.studies.composition.methods import Variant, methods
from moe_edge.studies.composition.settings import STUDY, ComposeSettings
from tests.support.tiny_checkpoint import write_tiny_checkpoint

NAMES = ("lru", "SMoE, a = 0.2", "q4_0", "prefer, bonus 0.2")
NAMES += ("pruned by 25 %, prefer, bonus 0.2", "q4_0, prefer, bonus 0.2")


def settings(tmp_path) -> ComposeSettings:
    sizes = {"tokens": 512, "length": 64, "timed_steps": 96, "calibration_tokens": 1024}
    few = {"shares": (0.25,), "link_factors": (2.0,), "live_cases": 1, "questions": 1}
    texts = {"text": str(BOOKS), "calibration": str(BOOKS)}
    return ComposeSettings(**sizes, **few, **texts, work_dir=str(tmp_path / "w"))


@pytest.mark.slow
def test_study_measures_goes_on_and_writes_an_entry(tmp_path, monkeypatch):
    chosen = [method for method in methods() if method.name in NAMES]
    assert len(chosen) == len(NAMES)
    monkeypatch.setattr(measure, "methods", lambda: chosen)
    monkeypatch.setattr(measure, "PRUNED", [Variant(removed=0.25)])
    monkeypatch.setattr(workshop, "TIMED", 48)
    study = dataclasses.replace(STUDY, inline=False)  # JAX has started here
    given = {"out_dir": str(tmp_path / "o"), "allow_dirty": True}
    summary = run_study(study, settings(tmp_path), **given)
    frames = tables(read_result(tmp_path / "o")["frames"])
    points = frames["points"].set_index("method")
    assert {*points.index} == {*NAMES}
    assert points.ratio["lru"] == 1.0 and points.slots["lru"] == 16
    assert points.slots["q4_0"] == 56  # of 64: a quarter of the bfloat16 bytes
    assert points.moved_kb["q4_0"] < 0.2 * points.moved_kb["lru"]
    assert points.moved["SMoE, a = 0.2"] < 0.7 * points.moved["lru"]
    assert summary["checks"].keys() and len(summary["numbers"]["replayed"]) == 1
    assert frames["quality"].model.tolist() == ["bfloat16", "bfloat16_reap25"]

    def nothing(*given):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "_fidelity", nothing)
    monkeypatch.setattr(measure, "measured_steps", nothing)
    again = run_study(study, settings(tmp_path), overwrite=True, **given)
    assert again["numbers"] == summary["numbers"]


def test_study_refuses_a_model_that_is_not_in_bfloat16(tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    given = ComposeSettings(
        checkpoint=str(tiny), text=str(BOOKS), calibration=str(BOOKS)
    )
    with pytest.raises(ConfigError, match="has experts in float32, expected bfloat16"):
        STUDY.check(given)
