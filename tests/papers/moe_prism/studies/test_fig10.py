"""Figure 10: the picture shows every model, and the table says what it shows."""

import numpy as np
import pytest

from moe_edge.metrics.frames import Rows
from moe_edge.papers.moe_prism.studies.fig10 import tell
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL
from moe_edge.papers.moe_prism.studies.operating_points import StepTimes
from moe_edge.papers.moe_prism.studies.studies import FIG10
from tests.support.entries import page_of, result_of, rows_of

ALL_K = tuple(range(1, 33))


def entry(rounds_of):
    """Every K of a refactored model, whole experts of the original."""
    step_s = {(LG, k, 1): rounds_of(k) for k in ALL_K}
    step_s |= {(ORIGINAL, k, 1): [0.001 * k] * 3 for k in ALL_K if k % 4 == 0}
    perplexity = {(name, k): 100.0 / k for name, k, _ in step_s}
    rows = Rows(FIG10.frames)
    tell(rows, StepTimes(step_s, perplexity))
    rows.about["workload"] = {"max_tokens": 4096}
    return result_of(FIG10, rows)


@pytest.fixture
def found():
    """A late round, which is late for every K."""
    return entry(lambda k: [0.001 * k, 0.001 * k, 0.004 * k])


def test_what_counts_is_fixed_and_rounds_that_are_too_rough_are_said(found):
    name = "batch 1: 2 standard errors within 1%"
    (batch,) = found["numbers"]["batches"]
    assert (batch["few"], batch["many"]) == (8, 32)
    assert found["checks"] == {name: True}
    rng = np.random.default_rng(0)
    rough = entry(lambda k: (0.001 * k * rng.uniform(0.95, 1.05, 3)).tolist())
    assert rough["checks"] == {name: False}
    assert "32/8 (32/8) at 1" in page_of(FIG10, found)[0]
    assert "32/8 (25/8) at 1" in page_of(FIG10, rough)[0]


def test_picture_has_a_line_of_every_model_and_the_tables_numbers(found, tmp_path):
    _, figures = page_of(FIG10, found)
    ((panels, _),) = figures.drawn.values()
    for panel, what in zip(panels, ("rate", "tpot_ms"), strict=True):
        assert panel["x"] == list(ALL_K)
        for name, ks in ((LG, ALL_K), (ORIGINAL, ALL_K[3::4])):
            rows = {r["k"]: r[what] for r in rows_of(found, "times", model=name)}
            values = [rows.get(k, np.nan) for k in ALL_K]
            np.testing.assert_equal(panel["series"][name], values)
            assert list(rows) == list(ks)
