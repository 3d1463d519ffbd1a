"""Usage curves, sensitivity and variants of UMA in computed time, on one task."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.studies import uma
from moe_edge.papers.coserve.studies.frequencies import Sensitivity, check_policies
from tests.support.entries import row_of
from tests.support.slow_cases import slow_but

SMALL = {
    "coserve_fig11": {"decays": (20.0, 50.0)},
    "coserve_sensitivity": {
        "machines": ("uma",),
        "tasks": ("b1",),
        "decays": (20.0, 50.0),
        "waits_s": (2.0, 60.0),
        "seeds": 1,
    },
    "coserve_uma": {"tasks": ("b1",), "seeds": 1},
}


@pytest.fixture(scope="module", params=slow_but(["coserve_fig11"], SMALL))
def entry(request, tmp_path_factory):
    study, folder = find(request.param), tmp_path_factory.mktemp(request.param) / "o"
    few = {name: uma.VARIANTS[name] for name in ("as assumed", "half the memory")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uma, "VARIANTS", few)
        settings = study.settings(**SMALL[request.param])
        summary = run_study(study, settings, out_dir=folder)
    return request.param, summary, validate_entry(folder)


def test_whole_study_writes_a_valid_entry(entry):
    name, summary, result = entry
    check_answer(summary["answer"])
    assert result["kind"] == "simulated" and all(summary["checks"].values())
    if name == "coserve_fig11":  # steeper frequencies need fewer experts
        steep, flat = (
            row_of(result, "needed", frequencies=f"exp(-i/{n})", share=0.5)
            for n in (20, 50)
        )
        assert steep["experts"] < flat["experts"]
    elif name == "coserve_sensitivity":
        by_bound = {row["at"]: row for row in result["numbers"]["by_bound"]}
        assert by_bound[2.0]["switches"] > by_bound[60.0]["switches"]
        assert by_bound[2.0]["longest_wait_s"] > 2.0
        ours = {"machine": "uma", "policy": "affinity"}
        empty = row_of(result, "runs", sweep="empty start", **ours)
        usual = row_of(result, "runs", sweep="decay", at=50.0, **ours)
        assert empty["over_least"] >= 1
        assert empty["throughput_per_s"] < usual["throughput_per_s"]
    else:
        half, usual = (
            row_of(result, "variants", variant=variant)
            for variant in ("half the memory", "as assumed")
        )
        assert half["switches_samba"] > usual["switches_samba"]


def test_variants_change_what_they_say():
    machine = get_preset("uma")
    cost = {
        name: change(machine).devices["gpu"]["yolov5m"]
        for name, (change, _) in uma.VARIANTS.items()
        if name != "no CPU executor"
    }
    usual = cost["as assumed"]
    assert cost["loads 1 s longer"].load_s["disk"] == pytest.approx(
        usual.load_s["disk"] + 1
    )
    assert cost["no fixed time of a batch"].b_s == 0
    changed = uma.VARIANTS["half the memory"][0](machine)
    assert changed.memory_bytes["gpu"] == machine.memory_bytes["gpu"] // 2
    assert uma.VARIANTS["no CPU executor"][0](machine).kinds == ["gpu", "gpu"]
    assert not uma.VARIANTS["loads in parallel"][0](machine).one_disk


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="decays must be positive, got -1"):
        Sensitivity(decays=(-1.0,))
    with pytest.raises(ConfigError, match="waits_s must be positive, got 0"):
        Sensitivity(waits_s=(0.0,))
    with pytest.raises(
        ConfigError, match="unknown policy of the bound of waiting 'aff"
    ):
        check_policies(Sensitivity(policies=("samba", "coserve")))
