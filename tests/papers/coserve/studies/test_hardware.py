"""Table 1: machines, with small files."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.studies.hardware import Hardware
from tests.support.entries import row_of


def test_whole_study_writes_a_valid_entry(tmp_path):
    study, folder = find("coserve_table1"), str(tmp_path / "entry")
    settings = study.settings(file_bytes=10_000, files=2, repeats=2)
    summary = run_study(study, settings, out_dir=folder)
    result = validate_entry(folder)
    check_answer(summary["answer"])
    assert result["kind"] == "measured"
    load_s = get_preset("numa").devices["gpu"]["resnet101"].load_s["disk"]
    assert row_of(result, "machines", machine="preset numa")["load_disk_s"] == load_s
    paper, here = (
        row_of(result, "machines", machine=m) for m in ("paper, NUMA", "here")
    )
    assert here["disk_bytes_per_s"] > 0 and paper["disk_bytes_per_s"] == 530e6
    names = [row["machine"] for row in summary["numbers"]["load_s"]]
    assert names == ["numa", "uma", "reduced", "here"]


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="file_bytes must be a positive whole number"):
        Hardware(file_bytes=0)
