"""Fidelity on a tiny model: the controls are exact, lossy routes are seen."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.fidelity import (
    CountedRoute,
    SwitchEngine,
    card,
    cut_rows,
    lossy_routes,
)
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.papers.smoe.substitute import Substitute
from moe_edge.route.base import TopK
from moe_edge.route.drop import DropAbsent
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

OPTIONS = OffloadOptions(device_memory="25%", eviction="smoe_score", asynchronous=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Rows, their reference and an offloaded engine of a tiny checkpoint."""
    tiny = write_tiny_checkpoint(tmp_path_factory.mktemp("fidelity") / "tiny")
    resident = load_engine(tiny, with_tokenizer=False).engine
    ids = np.random.default_rng(0).integers(1, 320, 200).tolist()
    rows = cut_rows(ids, rows=2, prompt_tokens=9, forced_tokens=31)
    switch = SwitchEngine(str(tiny), OPTIONS, batch=2, capacity=40)
    yield rows, score_batches(resident, rows, 2), switch
    switch.close()


def test_lossless_control_is_exact(measured):
    rows, reference, switch = measured
    run = switch.run(TopK(), rows, 2)
    for ours, theirs in zip(run.log_probs, reference.log_probs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found = card(Substitute(0.0), switch, run, reference)
    assert found["agreement"] == found["perplexity_ratio"] == 1.0
    assert found["changed_ratio"] == 0 < found["bytes_per_token"]
    assert 0 < found["hit_ratio"] < 1


def test_lossy_routes_change_predictions_and_move_less(measured):
    rows, reference, switch = measured
    exact = switch.run(TopK(), rows, 2)
    hits = switch.engine.movement()["hit_ratio"]
    for route in (Substitute(0.6), DropAbsent(0.45)):
        run = switch.run(route, rows, 2)
        found = card(route, switch, run, reference)
        assert found["changed_ratio"] > 0.02
        assert found["moved_nats"] > 1e-3 and found["perplexity_ratio"] != 1
        assert run.bytes_moved < exact.bytes_moved
        assert switch.engine.movement()["hit_ratio"] > hits
        changed = (switch.route.dropped, switch.route.substituted)
        assert min(changed) == 0 < max(changed)


def test_runs_do_not_inherit_a_cache(measured):
    rows, _, switch = measured
    first = switch.run(Substitute(0.3), rows, 2)
    switch.run(Substitute(0.6), rows[::-1], 2)
    again = switch.run(Substitute(0.3), rows, 2)
    assert compare(again, first).moved_nats == 0
    assert again.bytes_moved == first.bytes_moved


def test_counted_route_tells_dropped_from_substituted():
    class Swap(TopK):
        def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
            return np.asarray([[0, 4], [5, 4]], np.int32), weights_TK

    counted = CountedRoute(Swap())
    ids_TK = np.asarray([[0, 1], [2, 4]], np.int32)  # E = 4: the last one is padding
    counted.route(0, np.zeros((2, 4)), np.ones(4, bool), None, ids_TK, np.ones((2, 2)))
    assert (counted.chosen, counted.dropped, counted.substituted) == (3, 1, 1)
    assert counted.changed_ratio == pytest.approx(2 / 3)
    counted.use(TopK())
    assert counted.changed_ratio == 0 and counted.lossless


def test_lossy_routes_has_every_rule_once():
    grid = lossy_routes((0.1, 0.2), (0.05,), (0.5,))
    assert len(grid) == 3 * 2 + 2 + 1
    assert len(set(grid)) == 9


@pytest.mark.parametrize("given", [((1.0,), ()), ((), (-0.1,))])
def test_lossy_routes_refuses_values_out_of_range(given):
    with pytest.raises(ConfigError, match="must lie in"):
        lossy_routes(*given)


def test_cut_rows_are_spread_without_overlap():
    rows = cut_rows(range(100), rows=3, prompt_tokens=10, forced_tokens=20)
    assert [row.ids[0] for row in rows] == [0, 35, 70]
    assert rows[-1].ids[-1] == 99 and all(row.first == 10 for row in rows)


def test_cut_rows_refuses_a_short_text():
    with pytest.raises(RequestError, match="has 89 tokens; 3 rows of 10 . 20 need 90"):
        cut_rows(range(89), rows=3, prompt_tokens=10, forced_tokens=20)
    with pytest.raises(ConfigError, match="rows must be a positive .* got 0"):
        cut_rows(range(89), rows=0, prompt_tokens=10, forced_tokens=20)


def test_switch_engine_refuses_fused(tmp_path):
    with pytest.raises(ConfigError, match="in mode layered alone, got fused"):
        SwitchEngine("default", OffloadOptions(mode="fused"), batch=1, capacity=8)
