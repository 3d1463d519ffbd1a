"""A fidelity card of a quantised checkpoint against what it was made from."""

import dataclasses
import json
import shutil

import pytest

from moe_edge.bench.fidelity.study import (
    FIDELITY,
    QUANTISED,
    FidelitySettings,
    QuantisedSettings,
    reference_of,
)
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.schema import check_answer, validate_entry
from tests.support.block_formats import whole_blocks_folder
from tests.support.conversion import convert
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

SMALL = {"rows": 2, "prompt_tokens": 6, "forced_tokens": 20, "batch_sizes": (1, 2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    hf = whole_blocks_folder(folder / "hf")
    convert(hf, folder / "q", expert_dtype="q4_0", dtype="q8_0")
    (folder / "t.txt").write_text(TEXT * 3)
    return hf, folder / "q", str(folder / "t.txt")


@pytest.mark.slow
def test_card_is_against_the_source(folders, tmp_path):
    hf, quantised, text = folders
    settings = FidelitySettings(
        checkpoint=str(quantised), text=text, device_memory="25%", **SMALL
    )
    assert reference_of(settings) == str(hf)
    summary = run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"))
    names = ["1 of 3 experts"] * 2 + ["experts in q4_0, all else in q8_0"] * 2
    cards = summary["cards"]
    assert [card["option"] for card in cards] == names
    ours = cards[2]
    assert 0.14 < ours["bytes_share"] < 0.15  # 4.5 of 32 bits
    assert 0.5 < ours["agreement"] <= 1 and ours["perplexity_ratio"] != 1
    rounded = dataclasses.replace(
        settings,
        activations="int8",
        kv_cache="bfloat16",
        reference=str(quantised),
        batch_sizes=(1,),
    )
    card = run_study(FIDELITY, rounded, out_dir=str(tmp_path / "int8"))["cards"][1]
    assert card["option"] == f"{names[2]}, activations in int8, kv cache in bfloat16"
    assert 0.5 < card["agreement"] <= 1 and card["perplexity_ratio"] != 1
    result = validate_entry(tmp_path / "o")
    assert list(result["checks"].values()) == [True]
    stored = json.loads((tmp_path / "o" / "cards.json").read_text())
    assert [card["option"] for card in stored] == names


def test_reference_is_named_where_the_source_is_gone(folders, tmp_path):
    hf, quantised, text = folders
    gone = shutil.copytree(quantised, tmp_path / "q")
    manifest = json.loads((gone / "manifest.json").read_text())
    manifest["source"]["hf_path"] = "/nowhere"
    (gone / "manifest.json").write_text(json.dumps(manifest))
    settings = FidelitySettings(checkpoint=str(gone), text=text, **SMALL)
    with pytest.raises(ConfigError, match="q4_0 weights, .* there ./nowhere.; name"):
        run_study(FIDELITY, settings, out_dir=str(tmp_path / "o"))
    named = FidelitySettings(checkpoint=str(gone), reference=str(hf), **SMALL)
    assert reference_of(named) == str(hf)
    plain = FidelitySettings(checkpoint=str(hf), text=text, **SMALL)
    assert reference_of(plain) is None
    rounded = dataclasses.replace(plain, activations="int8")
    with pytest.raises(ConfigError, match="int8: measured against another run; name o"):
        run_study(FIDELITY, rounded, out_dir=str(tmp_path / "o"))


@pytest.mark.slow
def test_kinds_are_made_and_measured_against_the_checkpoint(folders, tmp_path):
    hf, _, text = folders
    settings = QuantisedSettings(
        checkpoint=str(hf), text=text, kinds=("q8_0", "q4_0", "mxfp4"), **SMALL
    )
    summary = run_study(QUANTISED, settings, out_dir=str(tmp_path / "o"))
    ours = [card for card in summary["cards"] if not card["control"]]
    kinds = [f"experts in {kind}" for kind in settings.kinds for _ in range(2)]
    assert [card["option"] for card in ours] == kinds
    assert ours[0]["moved_nats"] < ours[2]["moved_nats"]
    entry = validate_entry(tmp_path / "o")
    check_answer(entry["answer"])
    assert "bytes: experts in q8_0 27 %, experts in q4_0 14 %" in entry["details"][1]


def test_kinds_are_checked_whatever_stands_in_the_folder(
    folders, tmp_path, monkeypatch
):
    hf, _, text = folders
    (tmp_path / "q8_0").mkdir()
    (tmp_path / "q8_0" / "mine").write_text("kept")
    monkeypatch.chdir(tmp_path)
    QUANTISED.check(QuantisedSettings(checkpoint=str(hf), text=text, **SMALL))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": ()}, "kinds is .*list"),
        ({"kinds": ("q8_0", "q8_0")}, "each once"),
        ({"kinds": ("q5_k",)}, "unknown kinds"),
        ({"device_memory": "15%,25%"}, "15%,25%"),
        ({"offload": OffloadOptions(route="drop")}, "drop is lossy"),
    ],
)
def test_kinds_and_budget_are_checked(given, message):
    with pytest.raises(ConfigError, match=message):
        QuantisedSettings(**given)


def test_kinds_that_do_not_fit_are_refused_before_measuring(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf")  # experts of other widths than 32
    settings = QuantisedSettings(checkpoint=str(folder), **SMALL)
    with pytest.raises(ConfigError, match="q8_0.*32"):
        run_study(QUANTISED, settings, out_dir=str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()
