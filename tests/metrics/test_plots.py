import numpy as np
import pytest

from moe_edge.metrics import plots
from moe_edge.metrics.plots_panels import bounded


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_order_by_task_groups_experts_by_their_task():
    shares_NE = np.asarray([[0.1, 3.0, 0.2, 1.5], [2.0, 0.1, 0.9, 1.0]])
    # Task 0 prefers 1 and 3, task 1 prefers 0 and 2; favourites first.
    assert plots.order_by_task(shares_NE).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("layers", [1, 3])
def test_expert_usage_writes_a_picture(tmp_path, layers):
    counts = np.random.default_rng(0).integers(0, 9, (2, layers, 8))
    counts[1, 0] = 0  # a task that was not run is no division by zero
    path = tmp_path / "p.png"
    plots.expert_usage(path, counts, ["a", "b"], title="t", notes=["n"] * layers)
    assert min(png_size(path)) > 200


def test_only_a_line_with_bounds_has_error_bars():
    points = [
        ("a", 0, 2.0, (1.0, 2.5)),
        ("b", 0, 3.0, (3.0, 3.0)),
        ("b", 1, 4.0, (4, 4)),
    ]
    found = bounded(2, points)
    assert list(found["series"]) == ["a", "b"] and np.isnan(found["series"]["a"][1])
    assert {k: v.tolist() for k, v in found["spreads"].items()} == {
        "a": [[1.0, 0.0], [0.5, 0.0]]
    }
