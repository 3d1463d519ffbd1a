import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import moe_edge as me
from moe_edge.offload.evict_lru import Lru
from moe_edge.simulate.replay.predict import predictor_of, replay_predictor
from moe_edge.simulate.replay.run import run_replay
from tests.support.public import tiny_model
from tests.support.traces import PUBLIC_HEAD, make_trace

# Two slots hold 0 and 1 after the prefill; then as in simulate/replay/test_hits.py.
EXPERTS = [0, 1, 0, 2, 0, 1, 2, 1]
ROWS = [(int(s > 1), s, 0, [e]) for s, e in enumerate(EXPERTS)]
TRACE = make_trace(ROWS)


@dataclasses.dataclass(frozen=True)
class Silent(me.Predictor):
    """Predicts nothing, but is not the predictor none."""


@dataclasses.dataclass(frozen=True)
class Always(me.Predictor):
    """Names one expert for the next layer, whatever was chosen."""

    expert: int = 1

    def predict(self, state, layer, horizon):
        ids = np.full((horizon, 1), -1, np.int32)
        ids[0] = self.expert
        return ids, np.ones(ids.shape, np.float32)


@dataclasses.dataclass(frozen=True)
class NextOnly(me.Predictor):
    look_ahead = 1


seen: list[tuple[int, list]] = []


@dataclasses.dataclass(frozen=True)
class Spy(me.Predictor):
    """Keeps what it is shown: [T, K] ids of a layer."""

    needs = frozenset({"ids"})
    per_sequence = True

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        ids_TK = np.asarray(ids_TK)
        if not self.per_sequence:  # only then is padding shown, E
            ids_TK = ids_TK[ids_TK[:, 0] < tiny_model().config.moe.num_experts]
        seen.append((layer, ids_TK.tolist()))
        return state


@dataclasses.dataclass(frozen=True)
class SpyOfPrompts(Spy):
    whole_prompt = True


@dataclasses.dataclass(frozen=True)
class SpyOfBatches(Spy):
    per_sequence = False


class Newest(Lru):
    """Gives up what was used last."""

    def value(self, state):
        return -state["last_B"][state["key_S"]].astype(np.float32)


COUNTED = ("hits", "misses")


@pytest.fixture
def path(tmp_path):
    lines = [f"0,{p},{s},{layer},0,{ids[0]},1\n" for p, s, layer, ids in ROWS]
    (tmp_path / "t.csv").write_text(PUBLIC_HEAD + "".join(lines))
    return tmp_path / "t.csv"


def test_replay_of_all_is_what_the_command_prints(path, tmp_path):
    out = {"out_dir": str(tmp_path / "o"), "slots_per_layer": "2,3"}
    said = run_replay(**out, trace=str(path), num_experts=4, predictors="oracle")
    table = me.replay(path, num_experts=4, slots_per_layer=[2, 3])
    found = {(r.eviction, r.budget[0]): r.hit_ratio for r in table.itertuples()}
    assert said["hit_ratio"].pop("adapmoe_dp")  # a plan of slots
    assert found == {
        (name, size): ratio
        for name, by_size in said["hit_ratio"].items()
        for size, ratio in by_size.items()
    }
    given = {"evictions": ["lru"], "predictors": ["oracle"], "budgets": ["50%"]}
    (row,) = me.replay(TRACE, **given).itertuples()
    assert row.recall == said["recall"]["oracle"]["1"]


def test_replay_counts_by_hand_golden():
    """0 and 1 are there: 0 hit, 2 for 1, 0 hit, 1 for 2, 2 for 0, 1 hit."""
    given = {"evictions": ["lru"], "budgets": ["50%"], "expert_bytes": 10}
    (row,) = me.replay(TRACE, **given).itertuples()
    assert (row.slots, row.hits, row.misses, row.experts_moved) == (2, 3, 3, 3)
    assert (row.bytes_moved, row.recall, row.budget) == (30, None, "50%")
    assert me.replay(TRACE, **given | {"expert_bytes": None})["bytes_moved"][0] is None


def test_replay_with_a_predictor_that_is_always_right_hits_always():
    given = {"evictions": ["lru"], "budgets": [0.5], "predictors": ["oracle"]}
    (row,) = me.replay(TRACE, **given).itertuples()
    assert (row.hit_ratio, row.misses, row.recall, row.precision) == (1, 0, 1, 1)
    # The prompt leaves 0 and 1: 2, 1, 2 come ahead, as they would on demand.
    assert row.experts_moved == 3


def test_replay_with_a_predictor_counts_what_it_moves_in_vain():
    """After each step expert 1 is brought, which three of the next five do not want."""
    given = {"evictions": ["lru"], "budgets": [0.5], "predictors": [Always(), Silent()]}
    table = me.replay(TRACE, **given)
    always, silent = table.itertuples()
    assert always.predictor == "Always" and (always.recall, always.precision) == (
        pytest.approx(2 / 5),
        pytest.approx(2 / 5),
    )
    assert always.experts_moved > always.misses
    none = me.replay(TRACE, evictions=["lru"], budgets=[0.5]).iloc[0]
    same = ["hits", "misses", "experts_moved"]
    assert [getattr(silent, name) for name in same] == none[same].tolist()


def test_replay_takes_classes_objects_and_options():
    given = ["lru", Newest, Newest(), "successor"]
    table = me.replay(TRACE, evictions=given, budgets=["50%"])
    assert [*table["eviction"]] == ["lru", "Newest", "Newest", "successor"]
    assert table["hits"][1] == table["hits"][2] != table["hits"][0]
    options = {"expert": 2}
    given = {"predictors": ["none", Always], "predictor_options": options}
    table = me.replay(TRACE, evictions=["lru"], budgets=["50%"], **given)
    assert [*table["predictor"]] == ["none", "Always(expert=2)"]


def test_replay_of_an_engine_has_its_hit_ratio():
    """A prompt of one token: longer ones pass the engine's cache in chunks."""
    model = tiny_model()
    with model.offload("50%", eviction="lfu", record="trace") as engine:
        engine.generate([5], 12, ignore_eos=True)
        trace, stats = engine.trace, engine.stats()
    given = {"evictions": ["lfu"], "budgets": ["50%"]}
    (row,) = me.replay(trace, **given, expert_bytes=model.expert_bytes).itertuples()
    assert row.hit_ratio == stats["hit_ratio"] and 0 < row.hit_ratio < 1
    # The engine counts the prompt's transfers, too.
    assert row.bytes_moved <= stats["bytes_moved"]
    assert stats["bytes_moved"] % model.expert_bytes == 0


@pytest.fixture
def two_rows():
    """What an engine, and then a replay of its trace, says of two prompts at once."""

    def both(predictor, prompts, eviction="lru", horizon=1):
        seen.clear()
        given = {"eviction": eviction, "predictor": predictor, "horizon": horizon}
        more = {"mode": "layered", "max_batch": 2, "record": "trace"}
        with tiny_model().offload("50%", **given, **more) as engine:
            engine.generate(prompts, 6, ignore_eos=True)
            trace, report = engine.trace, engine.core.report()
        of_engine = [*seen]
        seen.clear()
        given = {"evictions": [eviction], "predictors": [predictor]}
        table = me.replay(trace, **given, budgets=["50%"], horizon=horizon)
        return of_engine, report, next(table.itertuples()), trace

    return both


@pytest.mark.parametrize("kind", [Spy, SpyOfPrompts, SpyOfBatches])
def test_replay_shows_a_predictor_what_the_engine_showed_it(kind, two_rows):
    of_engine, *_ = two_rows(kind(), [[3, 4, 5, 6], [7, 8]])
    # Once for recall, and once for the hits.
    assert len(of_engine) >= 12 and seen == 2 * of_engine


@pytest.mark.parametrize("predictor", ["previous", "frequency"])
def test_replay_of_a_batch_has_the_recall_of_its_engine(predictor, two_rows):
    _, report, row, trace = two_rows(predictor, [[3, 4, 5, 6], [7, 8]], horizon=2)
    told = report["prediction"]
    assert set(trace.request.tolist()) == {0, 1}
    log = replay_predictor(trace, predictor_of(predictor, trace), 2).summary()
    assert log == told and 0 < told["recall"][0] < 1
    assert 0 < row.recall < 1 and 0 < row.precision < 1


@pytest.mark.parametrize("predictor", ["previous", "frequency"])
def test_replay_of_a_batch_has_the_hits_of_its_engine(predictor, two_rows):
    """Prompts of one token: longer ones pass the engine's cache in chunks."""
    _, report, row, _ = two_rows(predictor, [[3], [7]])
    assert (row.hits, row.misses) == tuple(report["decode"][n] for n in COUNTED)


def test_replay_plans_slots_as_an_engine_does():
    rows = [(1, s, layer, [s % 4]) for s in range(8) for layer in range(2)]
    trace = make_trace(rows)
    assert [*me.replay(trace, evictions=["lru"], budgets=["40%", 0.5])["slots"]] == [
        3,
        4,
    ]
    table = me.replay(trace, evictions=["lru"], budgets=[0.5], slot_plan="adapmoe_dp")
    assert table["slots"][0] == 4


REFUSALS = {
    "no trace": ({"trace": 3}, "trace is 3, expected a file or engine.trace"),
    "no file": ({"trace": "/not/there.csv"}, "'/not/there.csv', and there is no such"),
    "no decoding": ({"trace": make_trace(ROWS[:2])}, "no decode step"),
    "both": ({"budgets": ["50%"], "slots_per_layer": [2]}, "got both"),
    "a size": ({"budgets": ["2GiB"]}, "budget '2GiB' is a size"),
    "too few": ({"budgets": ["25%"]}, "is 1 of the trace's 4 experts; the minimum"),
    "a fraction": ({"slots_per_layer": [2.5]}, "slots_per_layer must be .* got 2.5"),
    "no list": ({"budgets": "50%"}, "budgets is '50%', expected a list"),
    "no evictions": ({"evictions": []}, r"evictions is \[\], expected a list"),
    "a name": (
        {"evictions": ["lruu"]},
        "unknown cache policy 'lruu'; did you mean 'lru'[?] known: ",
    ),
    "a predictor": ({"predictors": ["x"]}, "unknown predictor 'x'; known: "),
    "a plan": ({"evictions": ["adapmoe_dp"]}, "write slot_plan='adapmoe_dp'"),
    "scores": ({"evictions": ["smoe_score"]}, "needs scores, and the trace has only"),
    "a horizon": (
        {"trace": make_trace([(1, 0, 0, [0]), (1, 0, 1, [0])])}
        | {"predictors": [NextOnly()], "horizon": 2},
        "horizon 2 exceeds what NextOnly looks ahead",
    ),
    "bytes": ({"expert_bytes": 0}, "expert_bytes must be a positive"),
    "a limit": ({"prefetch_limit": 0}, "prefetch_limit must be a positive"),
    "an argument": ({"policies": ["lru"]}, "no argument 'policies': write evictions"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_replay_refuses(name):
    change, message = REFUSALS[name]
    given = {"trace": TRACE, "evictions": ["lru"]} | change
    if "budgets" not in given and "slots_per_layer" not in given:
        given["budgets"] = ["50%"]
    with pytest.raises(me.MoeEdgeError, match=message):
        me.replay(**given)


def test_replay_needs_no_jax(path):
    code = (
        "import sys, moe_edge as me; "
        "me.replay(sys.argv[1], num_experts=4, slots_per_layer=[2]); "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=300)
