"""MoE-Prism's figure 3 as an entry, from a text or from a profile."""

import json

import pytest

from moe_edge.core.checks import CapacityError, CheckpointError, ConfigError
from moe_edge.metrics.schema import validate_entry
from moe_edge.profile.run_profile import run_profile
from moe_edge.studies.moe_prism.fig3 import run_activations
from moe_edge.studies.moe_prism.fig3_entry import SPARSER
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(TEXT * 4)
    return str(path)


@pytest.mark.slow
def test_entry_from_a_text_equals_that_from_its_profile(tiny, text, tmp_path):
    given = {"checkpoint": tiny, "max_tokens_per_expert": 100}
    made = run_activations(out_dir=str(tmp_path / "a"), text=text, **given)
    run_profile(out_dir=str(tmp_path / "p"), text=text, **given)
    again = run_activations(
        out_dir=str(tmp_path / "b"), profile=str(tmp_path / "p"), checkpoint=tiny
    )
    assert 0.25 < made["fixed_quarter"] < made["own_quarter"] < 1
    assert made["own_quarter"] == again["own_quarter"]
    result = validate_entry(tmp_path / "a")
    assert result["kind"] == "measured"
    assert result["checks"] == {SPARSER: False}  # random weights learned nothing
    assert result["workload"]["files"][0]["sha256"]
    assert result["paper_claim"]["paper"]["median magnitude"] == 0.0167
    assert not any("|" in row["name"] for row in result["metrics"])  # of the table
    curves = json.loads((tmp_path / "a" / "curves.json").read_text())
    assert set(curves["share_below"]) == {"0", "1"}
    for shares in curves["l1_share_of_first_neurons"].values():
        assert shares[0] == 0 and shares[-1] == pytest.approx(1)


def test_bad_input_is_refused(tiny, text, tmp_path):
    out = str(tmp_path / "o")
    with pytest.raises(ConfigError, match="--text"):
        run_activations(out_dir=out, checkpoint=tiny)
    with pytest.raises(CapacityError, match="more --tokens"):
        run_activations(out_dir=out, checkpoint=tiny, text=text, tokens=8)
    run_profile(out_dir=str(tmp_path / "p"), checkpoint=tiny, text=text, tokens=50)
    with pytest.raises(CheckpointError, match="run launch/profile_model"):
        run_activations(out_dir=out, profile=str(tmp_path / "p"))
    assert run_activations(out_dir=out, checkpoint=tiny, text=text, dry_run=True)
    assert not (tmp_path / "o").exists()
