"""Figure 11 of other models than the default one: its page says what was timed."""

from pathlib import Path

import pytest

from moe_edge.bench.study import run_study
from moe_edge.metrics.frames import plain, tables
from moe_edge.metrics.page import render
from moe_edge.metrics.schema import read_result, validate_entry
from moe_edge.papers.smoe.studies import fig11
from moe_edge.training.untrained import Sizes, write_untrained

ENTRY = Path(__file__).parents[4] / "results" / "smoe_fig11_s3"
ONE_MODEL = "here one model runs on links that differ"
OVERHEAD = ", so what an engine does beside"
LOSSY = "cannot be seen with random weights"


def page_of(model: dict, *, judged: bool) -> str:
    """The page of a stored entry, were it of another model.

    Args:
      judged: whether it knows which tokens agreed.
    """
    result = read_result(ENTRY)
    systems = result["frames"]["systems"]
    if not judged:
        place = len(systems["keys"]) + list(systems["units"]).index("agreement")
        del systems["units"]["agreement"], systems["bounds"]["agreement"]
        for row in systems["rows"]:
            del row[place]
    numbers = plain(fig11.derive(tables(result["frames"])))
    result |= {"model": model | {"params": 10**8}, "numbers": numbers}
    text, _ = render("smoe_fig11", result)
    return text


def test_a_page_speaks_of_the_model_that_was_timed():
    page = page_of({"name": "default", "weights": "toy trained here"}, judged=True)
    for said in (f"at a width of 192{OVERHEAD}", "One tiny model", "Fidelity beside"):
        assert said in page
    assert ONE_MODEL in page and LOSSY not in page
    wide = {"name": "../wide", "weights": "given", "width": 1152}
    wide |= {"experts": 64, "neurons": 192}
    page = page_of(wide, judged=True)
    assert "at a width of 1152.\n" in page and "Fidelity beside" in page
    for unsaid in ("One tiny model", "Random weights", ONE_MODEL, OVERHEAD, LOSSY):
        assert unsaid not in page
    page = page_of(wide | {"width": 96}, judged=True)
    assert f"at a width of 96{OVERHEAD}" in page


def test_a_page_of_random_weights_claims_no_fidelity():
    model = {"name": "../wide", "weights": "random, seed 0", "width": 1152}
    page = page_of(model | {"experts": 64, "neurons": 192}, judged=False)
    assert "Random weights, with 64 experts of 192 neurons a layer" in page
    assert LOSSY in page
    for unsaid in ("One tiny model", "agrees with the", "Fidelity beside", ONE_MODEL):
        assert unsaid not in page
    assert "fidelity of single tokens" not in page


@pytest.mark.slow
def test_random_weights_are_timed_and_not_judged(tmp_path):
    sizes = Sizes(96, num_layers=2, num_experts=8, top_k=2, expert_dim=8, shared_dim=8)
    write_untrained(tmp_path / "untrained", sizes)
    settings = fig11.STUDY.settings(
        checkpoint=str(tmp_path / "untrained"),
        device_memory="50%",
        batches=(1,),
        horizons=(1,),
        host_loads=(1 / 3,),
        history=1,
        rounds=2,
        prompt_tokens=8,
        new_tokens=6,
        choose_once=True,
        layerwise=False,
    )
    summary = run_study(fig11.STUDY, settings, out_dir=str(tmp_path / "o"))
    assert all(summary["checks"].values()), summary["checks"]
    result = validate_entry(tmp_path / "o")
    assert result["model"]["weights"] == "random, seed 0"
    assert "agreement" not in result["frames"]["systems"]["units"]
    assert summary["numbers"]["agreed"] == []
    page = (tmp_path / "o" / "README.md").read_text()
    assert LOSSY in page and "(random, seed 0)" in page
