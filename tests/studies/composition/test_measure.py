"""The whole study on the default model, with few methods and little text."""

import dataclasses

import pytest

from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import read_json
from moe_edge.studies.composition import measure
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
    monkeypatch.setattr(measure, "TIMED", 48)
    study = dataclasses.replace(STUDY, inline=False)  # JAX has started here
    given = {"out_dir": str(tmp_path / "o"), "allow_dirty": True}
    summary = run_study(study, settings(tmp_path), **given)
    points = {p["method"]: p for p in read_json(tmp_path / "o" / "points.json")}
    assert {*points} == {*NAMES}
    assert points["lru"]["ratio"] == 1.0 and points["lru"]["slots"] == 16
    assert points["q4_0"]["slots"] == 56  # of 64: a quarter of the bfloat16 bytes
    assert points["q4_0"]["moved_bytes"] < 0.2 * points["lru"]["moved_bytes"]
    assert points["SMoE, a = 0.2"]["moved"] < 0.7 * points["lru"]["moved"]
    assert summary["checks"].keys() and len(summary["replay_error"]) == 1

    def nothing(*given):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "_fidelity", nothing)
    monkeypatch.setattr(measure, "measured_steps", nothing)
    again = run_study(study, settings(tmp_path), overwrite=True, **given)
    assert again["leads"] == summary["leads"]


def test_study_refuses_a_model_that_is_not_in_bfloat16(tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    given = ComposeSettings(
        checkpoint=str(tiny), text=str(BOOKS), calibration=str(BOOKS)
    )
    with pytest.raises(ConfigError, match="has experts in float32, expected bfloat16"):
        STUDY.check(given)
