"""Figures 1, 5, 6 and 12 on the boards' networks, in short."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.studies.measured import NETWORKS, Measured
from tests.support.entries import row_of, rows_of
from tests.support.slow_cases import slow

SHORT = {"networks": ("board_resnet",), "small_batch": 2, "small_repeats": 2}


@pytest.mark.parametrize("name", ["coserve_fig1", *slow("coserve_fig5")])
def test_whole_study_writes_a_valid_entry(name, tmp_path):
    study, folder = find(name), tmp_path / "entry"
    summary = run_study(study, study.settings(**SHORT), out_dir=str(folder))
    result = validate_entry(folder)
    check_answer(summary["answer"])
    assert result["kind"] == "measured"
    row = row_of(result, "networks", network="board_resnet", device="cpu")
    if name == "coserve_fig1":
        load_ms, run_ms = row["load_disk_ms"], row["image_ms"]
        assert row["share_disk"] == pytest.approx(load_ms / (load_ms + run_ms))
        assert [r["tier"] for r in summary["numbers"]["spans"]] == ["disk", "host"]
    else:
        one, two = rows_of(result, "batches")
        assert two["memory_bytes"] > one["memory_bytes"] > 32 * 32 * 3 * 4
        assert row["k_ms"] > 0 and row["best_batch"] in (1, 2)
    assert result["model"]["params"]["board_resnet"] in range(60_000, 100_000)


def test_all_networks_are_known_and_others_refused():
    assert set(Measured().networks) == set(NETWORKS)
    with pytest.raises(ConfigError, match="unknown network 'vgg'; known: board_det"):
        Measured(networks=("vgg",))
    with pytest.raises(ConfigError, match="large_batch must be a positive whole numb"):
        Measured(large_batch=0)
