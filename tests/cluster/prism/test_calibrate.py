"""From a run's notes to its costs; the run is a simulated one of known costs."""

import types

import numpy as np
import pytest

from moe_edge.cluster.prism.calibrate import calibration_of, observe
from moe_edge.cluster.transport.wire import Kind
from moe_edge.hardware.cluster_calibration import BucketCosts, ServerCosts
from moe_edge.hardware.measured_costs import MeasuredCosts
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.turns import TurnLoop
from moe_edge.workload.requests import Request
from moe_edge.workload.traces import DECODE, PREFILL
from tests.support.cluster_runs import calibration

N, L, E, K, D = 3, 4, 12, 4, 4
CHUNK = 16


class NotedLoop(TurnLoop):
    """Remembers when tokens came."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.token_s = [[] for _ in self.requests]

    def _new_token(self, time_s, server, one):
        self.token_s[one.id].append(time_s)
        return super()._new_token(time_s, server, one)


def costs():
    """Unequal servers; software, messages and bytes all cost something."""
    servers = []
    for slower in (1.0, 1.25, 2.0):
        each = {"dense_s": 0.01 * slower, "split_s": 0.002, "call_s": 0.003 * slower}
        one = BucketCosts(tokens=1, pair_s=0.001 * slower, head_s=0.004, **each)
        many = BucketCosts(tokens=16, pair_s=0.0002, block_s=0.0005 * slower, **each)
        servers.append(ServerCosts(buckets=[one, many], load_s=1.0))
    messages = {"base_s": 0.002, "each_s": 0.0005, "bytes_per_s": 1e6}
    messages |= {"call_bytes": 10, "pair_bytes": 4, "token_bytes": 16, "row_bytes": 16}
    return type(calibration())(
        servers=servers,
        messages=type(calibration().messages)(**messages),
        source="test",
        cores=[2] * N,
    )


def served(true_costs, spacing_s, max_batch=1):
    rng = np.random.default_rng(5)
    ids = np.argsort(rng.random((60, L, E)), axis=2)[..., :K]
    requests = [
        Request(i, i % N, spacing_s * i, int(rng.integers(2, 12)), 6, "a")
        for i in range(24)
    ]
    on_NLE = rng.random((N, L, E)) < 0.6
    on_NLE[1] |= ~on_NLE.any(axis=0)
    on_NLE[:, 0] = True  # a layer without calls
    model = MeasuredCosts.of(true_costs, [L * E] * N, 768)
    placement = Placement(np.where(on_NLE, 0, -1))
    options = LoopOptions(max_batch=max_batch)
    loop = NotedLoop(requests, placement, model, RoutingPools({"a": ids}, E), options,
                     0, chunk_tokens=CHUNK)  # fmt: skip
    loop.run()
    return loop


def notes_of(loop):
    """A `MethodRun` as far as it is read: what servers would have noted."""
    first = loop.rows - np.array([r.input_tokens + r.output_tokens - 1
                                  for r in loop.requests])  # fmt: skip
    target_NLE = loop.table.target_NX.reshape(N, L, E)
    lookups = {n: [] for n in range(N)}
    for request in loop.requests:
        tokens = request.input_tokens + request.output_tokens - 1
        row = int(first[request.id] + tokens)  # rows count on while a request runs
        cells = loop.pools.cells("a", row, tokens).reshape(tokens, L, K)
        for token, ids_LK in enumerate(cells - np.arange(L)[:, None] * E):
            phase = PREFILL if token < request.input_tokens else DECODE
            for layer, ids_K in enumerate(ids_LK):
                holders = target_NLE[request.server, layer, ids_K]
                where = (request.id, phase, token, layer)
                lookups[request.server].append((*where, ids_K, holders))
    asked = {n: [] for n in range(N)}
    answered = {n: [] for n in range(N)}
    home = [request.server for request in loop.requests]
    sent = sorted(loop.calls_done, key=lambda call: (call.sent_s, call.end_s))
    for call in sent:
        caller, sizes = home[call.request], loop.cost_model.call_sizes
        states = (call.num_bytes - 10 - 20 * call.pairs) // 16
        asked[caller].append(
            (call.sent_s, call.end_s - call.sent_s, call.server, call.layer,
             call.request, call.pairs, states, call.pairs, call.num_bytes)
        )  # fmt: skip
        assert sizes.there(states, call.pairs) + 16 * call.pairs == call.num_bytes
        answered[call.server].append((call.end_s, call.compute_s, caller))
    notes = {}
    for n in range(N):
        columns = list(zip(*lookups[n], strict=True))
        names = ("request", "phase", "step", "layer", "ids_TK", "holder_TK")
        arrays = {
            f"lookups_{name}": np.array(column)
            for name, column in zip(names, columns, strict=True)
        }
        arrays["calls"] = np.array(asked[n], np.float64).reshape(-1, 9)
        arrays["answered"] = np.array(answered[n], np.float64).reshape(-1, 3)
        arrays["brought"] = np.array([[0.0, 0.25, 0, 0, -1], [0.0, 9.0, 0, 0, 1]])
        total = sum(call[8] for call in asked[n])
        notes[n] = ({"sent": {f"9:{int(Kind.CALL)}": [1, total]}}, arrays)
    requests = [
        types.SimpleNamespace(
            id=r.id, at=r.server, done=True, prompt=[0] * r.input_tokens,
            arrived_s=r.arrival_s, times_s=loop.token_s[r.id],
        )
        for r in loop.requests
    ]  # fmt: skip
    keeper = types.SimpleNamespace(held_NLE=np.zeros((N, L, E)))
    return types.SimpleNamespace(asked=requests, notes=notes, keeper=keeper)


def found_costs(runs):
    return calibration_of(
        runs,
        d_model=D,
        chunk_tokens=CHUNK,
        bucket=lambda tokens: 16,
        line_bytes_per_s=1e6,
        source="test",
    )


@pytest.mark.parametrize("max_batch", [1, 2])
def test_the_costs_of_a_run_give_its_latencies_again(max_batch):
    loop = served(costs(), 0.15, max_batch)
    found = found_costs([notes_of(loop)])
    again = served(found, 0.15, max_batch)
    assert (loop.finish_R > np.arange(24) * 0.15 + 0.2).sum() > 10  # some had to wait
    np.testing.assert_allclose(again.finish_R, loop.finish_R, rtol=0.07)
    mean_s, mean_again_s = (
        float(np.mean(one.finish_R - np.arange(24) * 0.15)) for one in (loop, again)
    )
    assert mean_again_s == pytest.approx(mean_s, rel=0.05)


def test_costs_of_a_quiet_run_are_those_of_the_cluster():
    true, found = costs(), found_costs([notes_of(served(costs(), 9.0))])
    for server, expected in zip(found.servers, true.servers, strict=True):
        (one, many), wanted = server.buckets, expected.buckets[0]
        assert one.call_s == pytest.approx(wanted.call_s, rel=0.02)
        assert one.pair_s == pytest.approx(wanted.pair_s, rel=0.02)
        per_layer_s = wanted.dense_s + wanted.head_s / L
        assert one.dense_s == pytest.approx(per_layer_s, rel=0.05)
        assert many.block_s == pytest.approx(expected.buckets[1].block_s, rel=0.1)
        assert server.load_s == 0.25  # of what came from the own checkpoint
    assert found.messages.call_bytes == 10
    sent = found.messages  # each call went alone
    assert sent.base_s + sent.each_s == pytest.approx(0.0025, rel=0.01)


def test_it_is_noted_how_many_servers_had_requests():
    run = notes_of(loop := served(costs(), 0.15))
    for seen in observe(run, CHUNK, lambda tokens: 16):
        assert {one.busy for one in seen} == {1, 2, 3}
    first = loop.token_s[0][0]  # of the first request, 0.15 s before the second came
    assert first < 0.15 and observe(run, CHUNK, lambda tokens: 16).passes[0].busy == 1
    alone = observe(notes_of(served(costs(), 9.0)), CHUNK, lambda tokens: 16)
    assert {one.busy for seen in alone for one in seen} == {1}


def test_requests_whose_calls_were_made_again_are_left_out():
    run = notes_of(served(costs(), 9.0))
    whole = observe(run, CHUNK, lambda tokens: 16)
    arrays = run.notes[0][1]
    assert len(whole.passes) == 24 * 6
    arrays["calls"][2, 3] += 1  # one of request 0, for another layer
    fewer = observe(run, CHUNK, lambda tokens: 16)
    assert len(fewer.passes) == 23 * 6
    assert len(observe(run, 1, lambda tokens: 16).passes) == 0
