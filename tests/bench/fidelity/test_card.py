"""A fidelity card of every option of a tiny model; bad input is refused."""

import dataclasses
import itertools
import json

import pytest

from moe_edge.bench.fidelity import scorers
from moe_edge.bench.fidelity.card import grid_of, pace
from moe_edge.bench.fidelity.picture import plot
from moe_edge.bench.fidelity.scorers import scorer_of
from moe_edge.bench.fidelity.study import FIDELITY, FidelitySettings
from moe_edge.bench.offloading import studied
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine import fused
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.stepwise import ForcedRun
from moe_edge.kernels import native
from moe_edge.metrics.schema import validate_entry
from moe_edge.offload.assist_base import AssistCosts
from moe_edge.route.base import get_route
from tests.metrics.test_plots import png_size
from tests.support.slow_cases import slow
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

FUSED = OffloadOptions(mode="fused")
SMALL = {"rows": 2, "prompt_tokens": 6, "forced_tokens": 20, "batch_sizes": (2,)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("card") / "tiny"))


@pytest.mark.slow
def test_study_writes_a_card_of_every_option(tiny, tmp_path, capsys):
    (tmp_path / "t.txt").write_text(TEXT * 3)
    settings = FidelitySettings(
        checkpoint=tiny,
        text="t.txt",
        data_dir=str(tmp_path),
        device_memory=" 25%",
        offload=OffloadOptions(
            route="substitute", route_options={"a": 0.5}, asynchronous=False
        ),
        a_values=(0.2,),
        thresholds=(0.3,),
        bonuses=(0.5,),
        **SMALL,
    )
    summary = run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"))
    cards = summary["cards"]
    # Half the experts, lossless, 3 rules, own's a, 2 of dropping, 1 bonus.
    assert len(cards) == 1 + 1 + 3 + 1 + 2 + 1
    assert cards[0]["option"] == "1 of 2 experts" and cards[0]["perplexity_ratio"] != 1
    assert {card["device_memory"] for card in cards[1:]} == {"25%"}
    lossless = [card for card in cards if card["option"] == "topk"]
    assert all(card["agreement"] == card["perplexity_ratio"] == 1 for card in lossless)
    assert [c["a"] for c in cards if c["option"] == "substitute"].count(0.5) == 1
    assert summary["weight_rule"]["best"] in summary["weight_rule"]["rules"]
    result = validate_entry(tmp_path / "o")
    assert list(result["checks"].values()) == [True]
    assert len(result["workload"]["text"]["sha256"]) == 64
    stored = json.loads((tmp_path / "o" / "cards.json").read_text())
    assert [card["option"] for card in stored] == [card["option"] for card in cards]
    names = {row["policy"] for row in result["metrics"]}
    assert "batch 2: 1 of 2 experts" in names
    assert any(name.startswith("25%, batch 2: substitute a=0.2") for name in names)
    assert "25%, batch 2: prefer by a bonus of 0.5" in names
    assert "lossless offloading" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
def test_options_of_mode_fused_take_turns(tiny, tmp_path, monkeypatch):
    even = AssistCosts(1.0, 1.0, 0.0)
    monkeypatch.setattr(fused, "measure_costs", lambda *given: even)
    (tmp_path / "t.txt").write_text(TEXT * 3)
    settings = FidelitySettings(
        checkpoint=tiny,
        text="t.txt",
        data_dir=str(tmp_path),
        device_memory="25%",
        offload=dataclasses.replace(
            FUSED, assist="two_pointer", assist_in_fused=True, assist_deferred=True
        ),
        a_values=(0.5,),
        thresholds=(0.3,),
        bonuses=(0.5,),
        deferred=("all",),
        in_turn=True,
        **SMALL | {"batch_sizes": (1,)},
    )
    summary = run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"))
    found = {(c["option"], c.get("assist")): c for c in summary["cards"]}
    # The lossless engine still has the host's help, which changes no bit here.
    lossless = found["topk", None]
    assert lossless["agreement"] == lossless["perplexity_ratio"] == 1
    assert lossless["step_ratio"] == 1 and lossless["changed_ratio"] == 0
    every, some = (
        found["assist_deferred", "all"],
        found["assist_deferred", "two_pointer"],
    )
    assert 1 > every["changed_ratio"] > some["changed_ratio"] > 0
    assert every["perplexity_ratio"] != 1 and every["batches"] == 2
    assert every["changed_ratio"] == pytest.approx(1 - every["hit_ratio"])
    assert every["bytes_per_token"] == 0 < some["bytes_per_token"]
    assert found["substitute", None]["changed_ratio"] > 0
    result = validate_entry(tmp_path / "o")
    assert "all " in result["answer"] and [*result["checks"].values()] == [True]
    names = {row["policy"] for row in result["metrics"]}
    assert "25%, batch 1: all on the host, a layer later" in names


def test_pace_is_the_median_ratio_of_batches_that_took_turns():
    ours, theirs = (ForcedRun([], [], 3, s, 0) for s in ([2.0, 3.0, 90.0], [1, 2, 3]))
    found = pace(ours, theirs)
    assert (found["step_ratio"], found["batches"]) == (2.0, 3)
    assert found["step_interval95"] == (1.5, 30.0)


def test_default_text_is_packaged_and_all_options_are_measured(tiny, tmp_path):
    settings = FidelitySettings(checkpoint=tiny)
    assert len(grid_of(settings)) == 3 * 6 + 2 * 4 + 3
    assert run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"), dry_run=True)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batch_sizes": ()}, ConfigError, r"batch_sizes is \(\), expected a list"),
        ({"batch_sizes": (0,)}, ConfigError, "batch_sizes must be .* got 0"),
        ({"a_values": (1.5,)}, ConfigError, "must lie in .0, 1., got 1.5"),
        ({"bonuses": (-1,)}, ConfigError, "bonus must be a number from 0, got -1"),
        ({"device_memory": "25%,x"}, ConfigError, "device memory 'x' is no budget"),
        ({"layerwise": True}, ConfigError, r"layerwise .* batch sizes \(2,\)"),
        (
            {"layerwise": True, "batch_sizes": (1,), "device_memory": "2GiB"},
            ConfigError,
            "layerwise does not go with device memory 2GiB",
        ),
        (
            {"layerwise": True, "batch_sizes": (1,), "reference": "default"},
            ConfigError,
            "layerwise does not go with reference default",
        ),
        (
            {"deferred": ("all",)},
            ConfigError,
            r"deferred is \('all',\), which is of mode fused, and the mode layered",
        ),
        ({"in_turn": True}, ConfigError, "in_turn is True, which is of mode fused"),
        (
            {"offload": FUSED, "deferred": ("two_front",)},
            ConfigError,
            "assist_in_fused is True and the assist two_front",
        ),
        (
            {"offload": FUSED, "deferred": ("some",)},
            ConfigError,
            "unknown assist 'some'",
        ),
        (
            {"offload": FUSED, "layerwise": True, "batch_sizes": (1,)},
            ConfigError,
            "layerwise does not go with mode fused",
        ),
        (
            {"offload": FUSED, "deferred": ("all",), "reference": "default"},
            ConfigError,
            "is measured against default, without lossy options",
        ),
        ({"rows": 10**6}, RequestError, "1000000 rows of 6 . 20 need 26000000"),
    ],
)
def test_bad_input_is_refused(tiny, tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        settings = FidelitySettings(**SMALL | {"checkpoint": tiny} | given)
        run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"deferred": ("all",)},
        {"offload": dataclasses.replace(FUSED, assist="all", assist_in_fused=True)},
    ],
)
def test_host_kernels_are_asked_for_before_rows_are_read(tiny, monkeypatch, given):
    def refuse():
        raise ConfigError("no host kernels")

    monkeypatch.setattr(scorers, "open_calls", refuse)
    settings = FidelitySettings(checkpoint=tiny, **{"offload": FUSED} | given)
    with pytest.raises(ConfigError, match="no host kernels"):
        scorer_of(settings, None)


def test_layer_by_layer_is_what_the_engine_does(tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT * 3)
    settings = FidelitySettings(
        checkpoint=tiny,
        text="t.txt",
        data_dir=str(tmp_path),
        device_memory="50%",
        offload=studied(slot_plan="equal", asynchronous=False, route="drop",
                        route_options={"threshold": 0.4}),
        a_values=(0.4,),
        thresholds=(0.3,),
        bonuses=(0.5,),
        **SMALL | {"batch_sizes": (1,), "prompt_tokens": 1},
    )  # fmt: skip
    loaded = load_engine(tiny)
    found = []
    for layerwise in (False, True):
        given = dataclasses.replace(settings, layerwise=layerwise)
        scorer, cards = scorer_of(given, loaded), []
        plain = scorer.plain(loaded.engine, 1)
        with scorer.budget(given.offloads["50%"]) as measure:
            routes = [get_route("topk"), *grid_of(given)]
            cards += [card for _, card in measure(routes, 1, plain)]
        found.append(cards)
    stepwise, layerwise = found
    for ours, theirs in zip(layerwise, stepwise, strict=True):
        assert ours["option"] == theirs["option"]
        assert ours["tokens"] == theirs["tokens"]
        # A row's first token is prefilled and its last one not fed in steps.
        assert ours["changed_ratio"] == pytest.approx(theirs["changed_ratio"], abs=0.1)
        for name in ("agreement", "perplexity_ratio"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)
    assert any(card["changed_ratio"] > 0.05 for card in layerwise)


def cards_of(kinds):
    """Half the experts, and lossy options at two budgets and batch sizes."""
    found = {
        "agreement": 0.9,
        "agreement_interval95": (0.8, 0.95),
        "perplexity_ratio": 1.1,
        "ratio_interval95": (1.0, 1.2),
    }
    lossy = []
    for budget, batch in itertools.product(("25%", "50%"), (1, 3)):
        at = {"control": False, "batch": batch, "device_memory": budget, **found}
        rule = {"weights": "own", "renormalise": True}
        lossy += [{"option": "substitute", "a": a, **rule, **at} for a in (0.1, 0.2)]
        rule = {"threshold": 0.1, "renormalise": False}
        lossy.append({"option": "drop", **rule, **at})
        lossy += [{"option": "assist_deferred", "assist": "all", **at}]
    half = {"option": "4 of 8 experts", "control": True, "batch": 1}
    return [half | found, *(card for card in lossy if card["option"] in kinds)]


@pytest.mark.parametrize(
    "kinds",
    [
        ("substitute", "drop", "assist_deferred"),
        *slow((("drop",),), (("substitute",),), (("assist_deferred",),)),
    ],
)
def test_picture_has_two_rows_a_kind(tmp_path, kinds):
    plot(tmp_path / "p.png", cards_of(kinds), title="t")
    width, height = png_size(tmp_path / "p.png")
    assert width > 900 and height > 600 * len(kinds)
