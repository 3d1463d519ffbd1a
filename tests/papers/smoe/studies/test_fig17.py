import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.bench.cases import Case
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Rows
from moe_edge.model.config import MoeConfig
from moe_edge.model.router import Routing
from moe_edge.papers.smoe.studies import fig17
from moe_edge.papers.smoe.studies.fig17 import Judged, PredictorSettings, TopScoreLog
from tests.support.entries import page_of, result_of
from tests.support.tiny_checkpoint import write_tiny_checkpoint

MOE = MoeConfig(num_experts=4, top_k=2, expert_dim=8)


def new_log(batch=1):
    return TopScoreLog(2, 4, 1, moe=MOE, top_a=0.5, batch=batch)


def counts(log, layer):
    """Top-score experts: predicted, in all predicted, in all."""
    top = log.top
    return tuple(
        int(x[layer, 0]) for x in (top.hits_LA, top.predicted_LA, top.chosen_LA)
    )


def routing(scores, ids):
    scores_TE, ids_TK = np.asarray(scores, np.float32), np.asarray(ids, np.int32)
    return Routing(jnp.asarray(ids_TK), jnp.ones(ids_TK.shape), jnp.asarray(scores_TE))


def test_log_compares_with_top_score_experts_only():
    log = new_log()
    log.expect(0, np.array([[0, 2]], np.int32))
    log.chosen(1, np.array([[0, 1]], np.int32))
    # The third score is 0.2: only expert 0 lies above 1.5 times that.
    log.note(1, routing([[0.5, 0.25, 0.2, 0.05]], [[0, 1]]))
    assert log.hits_LA[1, 0] == 1 and log.predicted_LA[1, 0] == 2
    assert log.chosen_LA[1, 0] == 2
    assert counts(log, 1) == (1, 2, 1)
    log.note(1, routing([[0.5, 0.25, 0.2, 0.05]], [[0, 1]]))
    assert counts(log, 1) == (1, 2, 1), "a prediction counts once"


def test_log_last_layer_predicts_the_next_token():
    log = new_log()
    log.expect(1, np.array([[3, -1]], np.int32))
    log.note(0, routing([[0.1, 0.1, 0.2, 0.6]], [[3, 2]]))
    assert counts(log, 0) == (1, 1, 2)


def test_log_leaves_prefill_out():
    log = new_log(batch=1)
    log.expect(0, np.array([[0]], np.int32))
    log.note(1, routing([[0.5, 0.25, 0.2, 0.05]] * 3, [[0, 1]] * 3))
    assert log.top.rounds_LA.sum() == 0


def test_judged_shares_add_rounds_up():
    logs = [new_log(), new_log()]
    for log, ids in zip(logs, ([0, 1], [2, 3]), strict=True):
        log.expect(0, np.array([ids], np.int32))
        log.chosen(1, np.array([[0, 1]], np.int32))
    judged = Judged(Case("p", "25%", 1, OffloadOptions()), logs)
    share = judged.share("predicted_LA", (slice(None), 0))
    assert (share.value, share.low, share.high) == (0.5, 0.0, 1.0)
    first, second = judged.by_layer("chosen_LA")
    assert np.isnan(first) and second == 0.5
    assert judged.share("chosen_LA", ..., top=True) is None


@pytest.mark.slow
def test_run_measures_predictors_of_a_real_run(tmp_path, monkeypatch):
    every = fig17.policies(PredictorSettings(horizon=1))
    few = ("smoe_partial", "smoe_partial, all chosen", "stale_gate")
    monkeypatch.setattr(
        fig17, "policies", lambda *_: {name: every[name] for name in few}
    )
    settings = PredictorSettings(
        checkpoint=str(write_tiny_checkpoint(tmp_path / "tiny")),
        device_memory="50%",
        batches=(1,),
        rounds=2,
        prompt_tokens=8,
        new_tokens=8,
        history=1,
    )
    rows = Rows(fig17.STUDY.frames)
    fig17.measure(settings, rows)
    result = result_of(fig17.STUDY, rows)
    assert all(result["checks"].values())
    one = {row["policy"]: row for row in result["numbers"]["one_ahead"]}
    # As many are predicted as are chosen: recall and precision are one number.
    for policy in few[1:]:
        assert 0 < one[policy]["recall"] <= 1
        assert one[policy]["recall"] == one[policy]["precision"]
    # The partial state has seen what is resident; the stale state has not.
    assert one[few[1]]["recall"] > one[few[2]]["recall"]
    page_of(fig17.STUDY, result)[1].draw(tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 5_000
