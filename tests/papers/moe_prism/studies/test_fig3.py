"""Figure 3: an entry from a text or a profile; words follow from the numbers."""

import json

import numpy as np
import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import CapacityError, CheckpointError, ConfigError
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.moe_prism.studies.fig3 import SPARSER, checks_of, explain
from moe_edge.papers.moe_prism.studies.sparsity import gated_noise, measure
from moe_edge.papers.moe_prism.studies.studies import FIG3 as STUDY
from moe_edge.papers.moe_prism.studies.studies import Fig3Settings
from moe_edge.profile.run_profile import run_profile
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

NEURONS = 16


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
    given = {"checkpoint": tiny, "text": text, "max_tokens_per_expert": 100}
    made = run_study(STUDY, Fig3Settings(**given), out_dir=str(tmp_path / "a"))
    run_profile(out_dir=str(tmp_path / "p"), **given)
    of_profile = Fig3Settings(checkpoint=tiny, profile=str(tmp_path / "p"))
    again = run_study(STUDY, of_profile, out_dir=str(tmp_path / "b"))
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
    def run(dry_run=False, **given):
        settings = Fig3Settings(**{"checkpoint": tiny, **given})
        return run_study(STUDY, settings, out_dir=str(tmp_path / "o"), dry_run=dry_run)

    with pytest.raises(ConfigError, match="--text"):
        run(dry_run=True)
    with pytest.raises(CapacityError, match="more --tokens"):
        run(text=text, tokens=8)
    run_profile(out_dir=str(tmp_path / "p"), checkpoint=tiny, text=text, tokens=50)
    with pytest.raises(CheckpointError, match="run moe-edge profile_model"):
        run(dry_run=True, checkpoint="default", profile=str(tmp_path / "p"))
    assert run(dry_run=True, text=text)["dry_run"]
    assert not (tmp_path / "o").exists()


def test_words_follow_from_the_numbers():
    wide = explain(np.array([1.0, 4.0]), 2.31)
    assert "2.31, 1% off the paper's: the ratio alone is no proof" in wide
    assert "have 2.50 on average and differ more among themselves" in wide
    assert "(standard deviation 1.50) than that from the paper's (0.16)" in wide
    narrow = explain(np.array([5.0, 5.2]), 3.5)
    assert "3.50, 49% off the paper's. Experts" in narrow
    assert "differ less among themselves (standard deviation 0.10)" in narrow


def test_check_fails_for_experts_that_learned_nothing():
    noise_TF = gated_noise(NEURONS)
    noise, sparse, even = (
        measure(rows_TF, np.ones(NEURONS))
        for rows_TF in (noise_TF, noise_TF**3, np.sign(noise_TF))
    )
    assert checks_of({0: {0: sparse}, 1: {0: sparse}}, noise) == {SPARSER: True}
    for other in (noise, even):
        # Another layer does not make up for it, another expert of the layer may.
        assert checks_of({0: {0: sparse}, 1: {0: other}}, noise) == {SPARSER: False}
    assert checks_of({0: {0: sparse, 1: noise}}, noise) == {SPARSER: True}
