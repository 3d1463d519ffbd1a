"""Table 1: machines, with small files."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.studies.hardware import Hardware


def test_whole_study_writes_a_valid_entry(tmp_path):
    study, folder = find("coserve_table1"), str(tmp_path / "entry")
    settings = study.settings(file_bytes=10_000, files=2, repeats=2)
    summary = run_study(study, settings, out_dir=folder)
    result = validate_entry(folder)
    check_answer(result["answer"])
    assert result["kind"] == "measured"
    rows = {(row["policy"], row["name"]): row["value"] for row in result["metrics"]}
    load_s = get_preset("numa").devices["gpu"]["resnet101"].load_s["disk"]
    assert rows["preset numa", "load of a resnet101, disk"] == load_s
    assert rows["here", "disk"] > 0 and rows["paper, NUMA", "disk"] == 530e6
    assert set(summary["load_s"]) == {"numa", "uma", "reduced", "here"}


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="file_bytes must be a positive whole number"):
        Hardware(file_bytes=0)
