"""The root of launch/place_experts.py."""

import json

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place import run_place as module
from moe_edge.place.baselines import Uniform
from moe_edge.place.cases import parse_slots
from moe_edge.place.placer import PLACERS
from moe_edge.place.plan import Placement
from moe_edge.place.run_place import run_place

ROWS = [("a", [10, 6, 3, 1]), ("b", [1, 2, 7, 10])]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.jsonl"
    with path.open("w") as file:
        for domain, numbers in ROWS:
            for layer in (0, 5):
                row = {"model": "m", "domain": domain, "layer": layer, "top_k": 2}
                row |= {"num_experts": 4, "tokens": 10, "counts": numbers}
                file.write(json.dumps(row) + "\n")
    return str(path)


def placed(tmp_path, counts, **changes):
    options = {"statistics": counts, "server_domains": "a,b", "slots": "5,6"}
    if "checkpoint" not in changes:
        options |= {"d_model": 8, "expert_dim": 4}
    return run_place(**({"out_dir": str(tmp_path / "o")} | options | changes))


def test_run_place_compares_all_methods_and_writes_placements(tmp_path, counts, capsys):
    summary = placed(tmp_path, counts)
    methods = summary["methods"]
    assert set(methods) == set(PLACERS) - {"eplb"}
    assert "equal servers" in summary["left_out"]["eplb"]
    # Server a keeps its first two of each layer and one third, b all but one first.
    best = methods["optimal"]
    assert best["objective"] == pytest.approx((1 + 1 + 3) / 20 + (1 + 1) / 20)
    assert best["gap_pct"] == 0.0
    assert best["coverage"] == 1.0
    assert best["memory_use"] == 1.0
    for name, row in methods.items():
        on_NLE = np.load(tmp_path / "o" / f"placement_{name}.npy")
        assert on_NLE.dtype == bool
        assert on_NLE.shape == (2, 2, 4)
        share = np.array([numbers for _, numbers in ROWS])[:, None] / 20
        value = (share * ~on_NLE).sum()
        assert row["objective"] == pytest.approx(value)
        gap = 100 * (value - best["objective"]) / best["objective"]
        assert row["gap_pct"] == pytest.approx(gap, abs=1e-9)
        placement = Placement.load(tmp_path / "o" / f"placement_{name}")
        placement.check([np.array([5]), np.array([6])])
    stored = json.loads((tmp_path / "o" / "place.json").read_text())
    assert stored["methods"] == methods
    assert stored["slots"] == [[5], [6]]
    assert len(stored["statistics_sha256"]) == 64
    assert "optimal" in capsys.readouterr().out


def test_run_place_named_methods_only_and_several_gpus(tmp_path, counts):
    summary = placed(tmp_path, counts, methods="prism, optimal", slots="3+2,6")
    assert list(summary["methods"]) == ["prism", "optimal"]
    placement = Placement.load(tmp_path / "o" / "placement_optimal")
    placement.check([np.array([3, 2]), np.array([6])])


def test_run_place_takes_objects_and_options(tmp_path, counts):
    given = [Uniform(), "prism"]
    summary = placed(tmp_path, counts, methods=given, slots="3+3,6")
    assert [*summary["methods"]] == ["uniform", "prism"]
    with pytest.raises(ConfigError, match="latency has no option 'x'; known: steps"):
        options = {"latency": {"x": 1}}
        placed(tmp_path, counts, placer_options=options, out_dir=str(tmp_path / "p"))


def test_run_place_server_without_memory_calls_the_others(tmp_path, counts):
    methods = placed(tmp_path, counts, slots="9,0")["methods"]
    assert set(methods) == set(PLACERS) - {"eplb"}
    for name, row in methods.items():
        assert row["coverage"] == 1.0
        on_NLE = np.load(tmp_path / "o" / f"placement_{name}.npy")
        assert on_NLE[0].all() and not on_NLE[1].any()


def write_counts(path, model, layers, experts=4):
    """Every domain's counts of these layers, each token choosing two experts."""
    with path.open("w") as file:
        for domain in "ab":
            for layer in layers:
                row = {"model": model, "domain": domain, "layer": layer, "top_k": 2}
                row |= {"num_experts": experts, "tokens": experts}
                file.write(json.dumps(row | {"counts": [2] * experts}) + "\n")
    return str(path)


def test_run_place_sizes_come_from_the_model_that_was_counted(tmp_path):
    reader = open_checkpoint("default")
    layers, experts = reader.config.moe_layers, reader.config.moe.num_experts
    stored = {
        "block": [reader.layout.d_model, reader.layout.expert_dim],
        "block_bytes": reader.layout.num_bytes(reader.dtype),
    }
    every = len(layers) * experts
    sizes = {"d_model": None, "expert_dim": None, "dry_run": True}
    sizes["slots"] = f"{every},{every}"
    # A profile names its checkpoint; other statistics are told whose they are.
    for model, checkpoint in (("default", None), ("mine", "default")):
        path = write_counts(tmp_path / "default.jsonl", model, layers, experts)
        found = placed(tmp_path, path, checkpoint=checkpoint, **sizes)
        assert {name: found[name] for name in stored} == stored
        assert found["coverage"] is None
    path = write_counts(tmp_path / "olmoe.jsonl", "OLMoE-1B-7B-0924", [0, 7, 15], 64)
    found = placed(tmp_path, path, **sizes | {"slots": "192,192"})
    assert (found["block"], found["block_bytes"]) == ([2048, 1024], 12_582_912)
    assert "3 of 16 layers" in found["coverage"]


def test_run_place_statistics_of_an_unknown_model_ask_for_its_sizes(tmp_path, counts):
    sizes = {"d_model": None, "expert_dim": None}
    with pytest.raises(
        ConfigError, match="sizes of model 'm' are not known: name its "
    ):
        placed(tmp_path, counts, **sizes)
    told = placed(tmp_path, counts, dry_run=True)
    assert (told["block"], told["block_bytes"]) == ([8, 4], 192)


def test_run_place_machines_are_named_or_assumed_aloud(tmp_path, counts, capsys):
    placed(tmp_path, counts, methods="optimal", out_dir=str(tmp_path / "first"))
    assert "assumed: a100_40g GPUs, 500 Mbps" in capsys.readouterr().out
    machines = {"cluster": "mixed", "cluster_options": {"gpus": [["h100"], ["a6000"]]}}
    machines["cluster_options"]["slow_servers"] = ()
    told = placed(tmp_path, counts, dry_run=True, **machines)
    assert (told["assumed"], told["cluster"]) == (None, "mixed")
    assert told["slots"] == [[5], [6]]
    fits = placed(tmp_path, counts, dry_run=True, **machines | {"slots": None})
    assert fits["slots"] == [[int(0.7 * gb * 10**9) // 192] for gb in (80, 48)]
    with pytest.raises(ConfigError, match=r"names \[2, 1\] GPUs .* mixed has \[1, 1\]"):
        placed(tmp_path, counts, **machines | {"slots": "3+2,6"})


@pytest.mark.parametrize(
    "model, layers, experts, message",
    [
        ("m", [0, 1, 3], 4, r"lacks layers \[2\] of m; count every layer"),
        ("OLMoE-1B-7B-0924", range(15), 64, r"lacks layers \[15\] of OLMoE"),
        ("OLMoE-1B-7B-0924", [0, 16], 64, r"counts layers \[16\], but .* 0 to 15 only"),
        ("OLMoE-1B-7B-0924", [0, 7], 8, "counts 8 experts a layer, but .* has 64"),
    ],
)
def test_run_place_statistics_that_contradict_the_model_are_refused(
    tmp_path, model, layers, experts, message
):
    path = write_counts(tmp_path / "wrong.jsonl", model, layers, experts)
    sizes = {} if model == "m" else {"d_model": None, "expert_dim": None}
    with pytest.raises(ConfigError, match=message):
        placed(tmp_path, path, slots="2000,2000", **sizes)


def test_run_place_all_leaves_out_nothing_but_the_picky(tmp_path, counts, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConfigError("broken statistics")

    monkeypatch.setattr(module.get_placer("greedy").__class__, "assign", refuse)
    with pytest.raises(ConfigError, match="broken statistics"):
        placed(tmp_path, counts)


def test_run_place_everything_everywhere_has_no_gap(tmp_path, counts):
    methods = placed(tmp_path, counts, slots="8,8")["methods"]
    assert methods["optimal"]["objective"] == 0.0
    assert methods["prism"]["gap_pct"] == 0.0
    assert methods["uniform"]["gap_pct"] is None


def test_run_place_preset_cluster_needs_no_data(tmp_path):
    summary = run_place(
        out_dir=str(tmp_path / "o"),
        model="mixtral_8x7b",
        methods="prism,optimal,latency",
    )
    rows = summary["methods"]
    assert rows["latency"]["predicted_s"] <= rows["optimal"]["predicted_s"]
    assert rows["prism"]["gap_pct"] >= 0
    assert np.load(tmp_path / "o" / "placement_latency.npy").shape == (3, 32, 8)


def test_run_place_dry_run_writes_nothing(tmp_path, counts):
    summary = placed(tmp_path, counts, dry_run=True)
    assert summary["dry_run"] is True
    assert summary["server_domains"] == ["a", "b"]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"slots": "3,4"}, CapacityError, "hold 7 blocks, .* needs 8: 1 blocks"),
        ({"slots": "5,6,7"}, ConfigError, "given for 3 servers, there are 2"),
        ({"slots": "5," + "9" * 5000}, ConfigError, "--slots is '5,999"),
        (
            {"slots": "5,999999999999999999"},
            ConfigError,
            r"slots of server 1 are \[999",
        ),
        ({"slots": "5,-6"}, ConfigError, "--slots is '5,-6', expected whole"),
        ({"slots": None}, ConfigError, "--statistics needs --server_domains"),
        ({"server_domains": "a,c"}, ConfigError, "unknown domain 'c'; known: a, b"),
        ({"methods": "best"}, ConfigError, "unknown placer 'best'; known: eplb"),
        ({"methods": "eplb"}, ConfigError, "eplb needs equal servers"),
        ({"cluster": "prims"}, ConfigError, "unknown cluster preset 'prims'"),
        ({"expert_dim": None}, ConfigError, "expert_dim is None; give both"),
        (
            {"checkpoint": "default", "d_model": 8, "expert_dim": 4},
            ConfigError,
            "name the sizes twice",
        ),
        (
            {"statistics": None, "slots": None},
            ConfigError,
            "expert_dim belong to --statistics; presets",
        ),
        ({"statistics": None}, ConfigError, "--slots and --top_k belong to"),
        (
            {"statistics": None, "slots": None, "d_model": None, "expert_dim": None},
            ConfigError,
            "names 2 domains, cluster prism has 3 servers",
        ),
    ],
)
def test_run_place_bad_input_is_refused(tmp_path, counts, changes, error, message):
    with pytest.raises(error, match=message):
        placed(tmp_path, counts, **changes)
    assert not (tmp_path / "o").exists()


def test_parse_slots_plus_joins_the_gpus_of_a_server():
    assert [s.tolist() for s in parse_slots("80, 70,10+20+30")] == [
        [80],
        [70],
        [10, 20, 30],
    ]
