import numpy as np

from moe_edge.training import plots
from tests.metrics.test_plots import png_size


def test_loss_curve_skips_rows_without_a_value(tmp_path):
    rows = [{"tokens": 1000 * i, "loss": 8.0 - i} for i in range(5)]
    rows[2]["held_out_loss"] = 6.5
    path = tmp_path / "p.png"
    plots.loss_curve(path, rows, title="t")
    assert min(png_size(path)) > 200


def test_routing_entropy_writes_a_picture(tmp_path):
    path = tmp_path / "p.png"
    plots.routing_entropy(path, np.full((2, 3), 4.0), ["a", "b"], num_experts=64)
    assert min(png_size(path)) > 200
