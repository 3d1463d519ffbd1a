"""A lossy route on several servers: what is here stands for what is in slots."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.layerwise import LayerwiseText, Placed
from moe_edge.route.base import Route, get_route
from tests.support.layered import (
    BLOCKS,
    NINE,
    THREE,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
)
from tests.support.tiny_models import ALL, random_prompts
from tests.support.tiny_servers import Servers, spread

NAME, STEPS = "gqa", 12
PREFER = get_route("prefer", bonus=1.5)


@dataclasses.dataclass(frozen=True, eq=False)
class AsPlaced(Route):
    """Another route, told that only a server's own blocks are in slots."""

    held_LE: np.ndarray
    inner: Route
    name = "as_placed"
    SOURCE = "test"
    lossless = False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        given = scores_TE, self.held_LE[layer], params, ids_TK, weights_TK
        return self.inner.route(layer, *given)


@pytest.mark.parametrize("lengths", [NINE, THREE])
def test_route_gives_the_bits_of_one_engine_with_the_same_blocks_near(lengths):
    """One machine that has all blocks, and a route that calls the others' absent."""
    held_NLE = spread(ALL[NAME], 3)
    prompts = random_prompts(ALL[NAME], lengths)
    servers = Servers(NAME, np.float32, held_NLE, route=PREFER)
    found = forced_logits(servers.engines[1], prompts, STEPS)
    route = AsPlaced(held_NLE[1], PREFER)
    with layered(NAME, slots=BLOCKS, route=route, with_trace=False) as engine:
        wanted = forced_logits(engine, prompts, STEPS)
    np.testing.assert_array_equal(found, wanted)
    moved = servers.engines[1].moved()
    assert 0 < moved.substituted < moved.routed


def test_route_saves_calls_and_states_its_share():
    held_NLE, prompts = spread(ALL[NAME], 3), random_prompts(ALL[NAME], NINE)
    calls = {}
    for name, route in (("topk", None), ("prefer", PREFER)):
        servers = Servers(NAME, np.float32, held_NLE, route=route)
        engine = servers.engines[0]
        forced_logits(engine, prompts, STEPS)
        engine.ledger.counts()
        calls[name] = engine.ledger.remote_blocks
        assert engine.lossless == (name == "topk")
    assert calls["prefer"] < 0.8 * calls["topk"]
    engine.reset_records()
    assert engine.moved().routed == 0


def test_route_that_is_off_gives_the_resident_bits():
    off = get_route("substitute", a=0.0)
    servers = Servers(NAME, np.float32, spread(ALL[NAME], 3), route=off)
    assert_same_bits(servers.engines[0], NAME, np.float32, NINE, STEPS)
    assert servers.engines[0].moved().substituted == 0


def test_deterministic_rows_refuse_a_lossy_route():
    servers = Servers(NAME, np.float32, spread(ALL[NAME], 2), route=PREFER)
    servers.engines[0].check_rows()
    with pytest.raises(ConfigError, match="deterministic rows and route prefer"):
        servers.engines[0].check_rows(deterministic=True)


class Twice(Route):
    """Gives one expert twice."""

    name, SOURCE, lossless = "twice", "test", False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        return np.zeros_like(ids_TK), weights_TK


def test_choice_of_another_author_is_checked():
    servers = Servers(NAME, np.float32, spread(ALL[NAME], 2), route=Twice())
    prompts = random_prompts(ALL[NAME], NINE)
    with pytest.raises(ConfigError, match="route twice gave one token the ids"):
        forced_logits(servers.engines[0], prompts, 2)


def test_layerwise_text_tells_what_a_server_s_route_costs():
    """As token by token on the server: its calls, its changes, its predictions."""
    held_NLE, rows = spread(ALL[NAME], 2), random_prompts(ALL[NAME], [12] * 2)
    resident = ResidentEngine(load_weights(StoreReader(ALL[NAME])))
    run = LayerwiseText(resident, np.array(rows)).run(PREFER, Placed(held_NLE[0]))
    engine = Servers(NAME, np.float32, held_NLE, route=PREFER).engines[0]
    active_B, log_probs = np.ones(1, bool), []
    for row in rows:
        session = engine.new_session(1, 12)
        for token, following in zip(row, [*row[1:], None], strict=True):
            token_B = np.array([token], np.int32)
            logits = np.asarray(engine.decode(session, token_B, active_B))[0]
            if following is not None:
                top = logits.max()
                total = np.log(np.exp(logits - top).sum()) + top
                log_probs.append(logits[following] - total)
    engine.ledger.counts()
    assert run.misses == engine.ledger.remote_blocks / 24
    moved = engine.moved()
    assert run.changed_ratio == moved.substituted / moved.routed
    ours = np.concatenate(run.forced.log_probs)
    np.testing.assert_allclose(ours, log_probs, atol=1e-4)
