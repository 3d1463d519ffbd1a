"""Figures 1, 5, 6 and 12 on the boards' networks, in short."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.measured import NETWORKS, Measured
from tests.support.slow_cases import slow

SHORT = {"networks": ("board_resnet",), "small_batch": 2, "small_repeats": 2}


@pytest.mark.parametrize("name", ["coserve_fig1", *slow("coserve_fig5")])
def test_whole_study_writes_a_valid_entry(name, tmp_path):
    study, folder = find(name), tmp_path / "entry"
    summary = run_study(study, study.settings(**SHORT), out_dir=str(folder))
    result = validate_entry(folder)
    check_answer(result["answer"])
    assert result["kind"] == "measured"
    value = {row["name"]: row["value"] for row in result["metrics"]}
    if name == "coserve_fig1":
        share = value["share of the load, disk"]
        load_ms, run_ms = value["load, disk"], value["one image"]
        assert share == pytest.approx(load_ms / (load_ms + run_ms))
        assert list(summary["shares"]) == ["disk", "host"]
    else:
        assert value["memory, batch 2"] > value["memory, batch 1"] > 32 * 32 * 3 * 4
        assert value["K"] > 0 and value["best batch"] in (1, 2)
    assert result["model"]["params"]["board_resnet"] in range(60_000, 100_000)


def test_all_networks_are_known_and_others_refused():
    assert set(Measured().networks) == set(NETWORKS)
    with pytest.raises(ConfigError, match="unknown network 'vgg'; known: board_det"):
        Measured(networks=("vgg",))
    with pytest.raises(ConfigError, match="large_batch must be a positive whole numb"):
        Measured(large_batch=0)
