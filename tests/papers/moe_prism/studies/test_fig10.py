"""Figure 10: the picture shows every model, and the table says what it shows."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_edge.papers.moe_prism.studies.fig10 import findings
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL
from moe_edge.papers.moe_prism.studies.operating_points import StepTimes
from moe_edge.papers.moe_prism.studies.studies import Fig10Settings

ALL_K = tuple(range(1, 33))


def entry(rounds_of):
    """Every K of a refactored model, whole experts of the original."""
    step_s = {(LG, k, 1): rounds_of(k) for k in ALL_K}
    step_s |= {(ORIGINAL, k, 1): [0.001 * k] * 3 for k in ALL_K if k % 4 == 0}
    perplexity = {(name, k): 100.0 / k for name, k, _ in step_s}
    settings = Fig10Settings(lg="unused", batches=(1,))
    times = StepTimes(step_s, perplexity)
    return findings(settings, times, model={}, workload={}, checks={})


@pytest.fixture
def found():
    """A late round, which is late for every K."""
    return entry(lambda k: [0.001 * k, 0.001 * k, 0.004 * k])


def test_what_counts_is_fixed_and_rounds_that_are_too_rough_are_said(found):
    name = "batch 1: 2 standard errors within 1%"
    points = {"original, batch 1": 8, "LG, batch 1": 32}
    assert found.checks == {name: True}
    assert found.summary["operating_points"] == points
    rng = np.random.default_rng(0)
    rough = entry(lambda k: (0.001 * k * rng.uniform(0.95, 1.05, 3)).tolist())
    assert rough.checks == {name: False}
    assert "32/8 (32/8) at 1" in found.answer
    assert "32/8 (25/8) at 1" in rough.answer
    counts = {
        row["policy"]: row["value"]
        for row in rough.metrics
        if row["name"] == "operating points that rounds tell apart, batch 1"
    }
    assert counts["LG"] < rough.summary["operating_points"]["LG, batch 1"]


def test_picture_has_a_line_of_every_model_and_the_tables_numbers(
    found, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    found.plot(tmp_path / "p.png")
    rows = {(row["policy"], row["name"]): row["value"] for row in found.metrics}
    monkeypatch.undo()
    for axis, what in zip(drawn[0].axes, ("throughput", "TPOT"), strict=True):
        lines = {bars.get_label(): bars.lines[0] for bars in axis.containers}
        for name, ks in ((LG, ALL_K), (ORIGINAL, ALL_K[3::4])):
            line = lines[name]
            assert list(line.get_xdata()) == list(ks)
            assert not np.isnan(line.get_ydata()).any()  # a gap breaks the line
            shown = [rows[name, f"{what}, K={k}, batch 1"] for k in ks]
            np.testing.assert_allclose(line.get_ydata(), shown)
        assert lines[ORIGINAL].get_marker() == "o"
