"""Figure 3: an entry from a text or a profile; words follow from the numbers."""

import numpy as np
import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import CapacityError, CheckpointError, ConfigError
from moe_edge.metrics.frames import Estimate, Rows
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.moe_prism.studies.fig3 import MEASURES, SPARSER
from moe_edge.papers.moe_prism.studies.sparsity import gated_noise, measure
from moe_edge.papers.moe_prism.studies.studies import FIG3 as STUDY
from moe_edge.papers.moe_prism.studies.studies import Fig3Settings
from moe_edge.profile.run_profile import run_profile
from tests.support.entries import page_of, result_of, rows_of
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
    whole = made["numbers"]["whole"]
    assert 0.25 < whole["fixed"] < whole["own"] < 1
    assert whole["own"] == again["numbers"]["whole"]["own"]
    result = validate_entry(tmp_path / "a")
    assert result["kind"] == "measured"
    assert result["checks"] == {SPARSER: False}  # random weights learned nothing
    assert result["workload"]["files"][0]["sha256"]
    assert {row["layer"] for row in rows_of(result, "below")} == {"0", "1"}
    for row in rows_of(result, "lorenz"):
        if row["first"] in (0, 1):
            assert row["share"] == pytest.approx(row["first"])


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


def shares(ratio, std=0.0, own=0.5):
    """Measures of experts, or of noise."""
    found = {"own": own, "fixed": 0.4, "shuffled": 0.5}
    return found | {"ratio": Estimate(ratio, 2, ratio - std, ratio + std, "std")}


def entry(noise_ratio, mean, std, own_of_layers=(0.6, 0.6)):
    rows = Rows(STUDY.frames)
    rows.about["workload"] = {"experts_with_too_few_tokens": 0}
    rows("experts", "all layers", **shares(mean, std))
    for layer, own in enumerate(own_of_layers):
        rows("experts", f"layer {layer}", **shares(mean, own=own))
    rows("experts", "gated noise", **shares(noise_ratio))
    for quantile in (0.5, 0.75):
        rows("quantiles", "one", quantile, magnitude=quantile)
    rows("below", "0", 1.0, share=0.5)
    rows("lorenz", "own", 1.0, share=1.0)
    return result_of(STUDY, rows)


def test_words_follow_from_the_numbers():
    wide, _ = page_of(STUDY, entry(2.31, 2.5, 1.5))
    assert "2.31, 1% off the paper's: the ratio alone is no proof" in wide
    assert "have 2.50 on average and differ more among themselves" in wide
    assert "(standard deviation 1.50) than that from the paper's (0.16)" in wide
    narrow, _ = page_of(STUDY, entry(3.5, 5.1, 0.1))
    assert "3.50, 49% off the paper's. Experts" in narrow
    assert "differ less among themselves (standard deviation 0.10)" in narrow


def test_check_fails_for_experts_that_learned_nothing():
    assert entry(2.3, 2.5, 0.1)["checks"] == {SPARSER: True}
    # Another layer does not make up for it.
    assert entry(2.3, 2.5, 0.1, (0.6, 0.5))["checks"] == {SPARSER: False}


def test_sparse_experts_differ_from_noise_in_their_own_quarter():
    noise_TF = gated_noise(NEURONS)
    noise, sparse, even = (
        MEASURES["own"](measure(rows_TF, np.ones(NEURONS)))
        for rows_TF in (noise_TF, noise_TF**3, np.sign(noise_TF))
    )
    assert even < noise < sparse
