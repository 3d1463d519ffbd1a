import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.layerwise import Cached, LayerwiseText, cut_tokens
from moe_edge.offload.evict_base import get_eviction
from moe_edge.route.base import get_route
from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import equal_slots
from tests.support.layered import StoreReader, layered
from tests.support.tiny_models import ALL, random_prompts

ROWS, LENGTH, SLOTS = 3, 12, 5


@pytest.fixture(scope="module")
def text():
    engine = ResidentEngine(load_weights(StoreReader(ALL["gqa"])))
    rows = random_prompts(engine.config, [LENGTH] * ROWS)
    return LayerwiseText(engine, np.array(rows))


@pytest.mark.parametrize("name, options", [("prefer", {"bonus": 1.0}), ("topk", {})])
def test_layerwise_run_looks_up_what_a_decoding_engine_does(text, name, options):
    """Row by row and token by token over one cache, the engine makes the same lookups,
    with the same hits, and its logits give the same log-probabilities up to rounding.
    """
    cached = Cached(get_eviction("lru"), SLOTS)
    run = text.run(get_route(name, **options), cached)
    moe_layers = len(text.config.moe_layers)
    given = {"slot_plan": "equal", "asynchronous": False}
    given |= {"route": name, "route_options": options}
    engine = layered("gqa", slots=SLOTS * moe_layers, **given)
    active_B, log_probs = np.ones(1, bool), []
    with engine:
        for row in text.tokens_NS:
            session = engine.new_session(1, LENGTH)
            for token, following in zip(row[:-1], row[1:], strict=True):
                logits = np.asarray(engine.decode(session, row_of(token), active_B))[0]
                top = logits.max()
                total = np.log(np.exp(logits - top).sum()) + top
                log_probs.append(logits[following] - total)
            engine.decode(session, row_of(row[-1]), active_B)
        seen = engine.trace.trace()
    np.testing.assert_array_equal(run.trace.ids_TK, seen.ids_TK)
    np.testing.assert_array_equal(run.trace.hit_TK, seen.hit_TK)
    ours = np.concatenate(run.forced.log_probs)
    np.testing.assert_allclose(ours, log_probs, atol=1e-4)
    assert run.misses == (~seen.hit_TK).sum() / (ROWS * LENGTH)
    assert (run.changed_ratio > 0) == (name != "topk")


def row_of(token) -> np.ndarray:
    return np.array([token], np.int32)


def test_trace_of_a_run_replays_to_the_same_misses(text):
    run = text.run(get_route("drop", threshold=0.2), Cached(get_eviction("lru"), SLOTS))
    found = replay(run.trace, get_eviction("lru"), equal_slots(run.trace, SLOTS))
    assert found.misses_L.sum() == round(run.misses * ROWS * LENGTH)


def test_without_a_cache_nothing_misses_and_nothing_changes(text):
    run = text.run(get_route("prefer", bonus=1.0))
    assert run.misses == 0 and run.changed_ratio == 0 and run.trace.hit_TK.all()


def test_cut_tokens_takes_rows_of_the_whole_text():
    rows = cut_tokens(range(100), tokens=20, length=11)
    assert rows.shape == (2, 11) and rows[0, 0] == 0 and rows[-1, -1] == 99
    with pytest.raises(RequestError, match="has 100 tokens; 10 rows of 11 need 110"):
        cut_tokens(range(100), tokens=100, length=11)


def test_layerwise_rejects_what_it_cannot_pass(text):
    with pytest.raises(RequestError, match=r"shape \(2, 1\), expected \[N, S\]"):
        LayerwiseText(text.engine, np.zeros((2, 1), np.int32))
    states = ResidentEngine(load_weights(StoreReader(ALL["states"])))
    with pytest.raises(ConfigError, match="has layers that keep a state"):
        LayerwiseText(states, text.tokens_NS)
    dense = dataclasses.replace(ALL["gqa"], dense_layers=(0, 1, 2))
    plain = ResidentEngine(load_weights(StoreReader(dense)))
    with pytest.raises(ConfigError, match="this is a dense model"):
        LayerwiseText(plain, text.tokens_NS)
