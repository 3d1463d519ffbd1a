import inspect
import subprocess
import sys

import pandas
import pytest

import moe_edge as me
from moe_edge.public import case_engines, compare, resident_run
from moe_edge.public.case_engines import CaseEngines
from moe_edge.public.plot import _labels
from tests.support.public import resident, tiny_folder, tiny_model
from tests.support.slow_cases import slow

GIVEN = {"evictions": ["lru", "lfu"], "budgets": ["40%"], "prompts": [[3, 4, 5]]}
GIVEN |= {"rounds": 2, "max_new_tokens": 6}


@pytest.fixture
def no_child(monkeypatch):
    """The resident row from this process."""

    def run(model, rows, max_new_tokens, rounds):
        tokens = [
            resident().generate(ids, max_new_tokens, ignore_eos=True).tokens
            for ids in rows
        ]
        return {"tokens": tokens, "rounds": rounds * [resident().stats()]}

    monkeypatch.setattr(compare, "run_resident", run)


def alive(monkeypatch):
    """How many engines were alive at once: the most, and how many were made."""
    count = {"now": 0, "most": 0, "made": 0}
    offload, close = me.Model.offload, me.Engine.close

    def begin(*args, **kwargs):
        engine = offload(*args, **kwargs)
        count["now"] += 1
        count["made"] += 1
        count["most"] = max(count["most"], count["now"])
        return engine

    def end(engine):
        count["now"] -= 1
        close(engine)

    monkeypatch.setattr(me.Model, "offload", begin)
    monkeypatch.setattr(me.Engine, "close", end)
    return count


@pytest.mark.slow
def test_compare_keeps_no_more_engines_than_fit(no_child, monkeypatch):
    """Both ways give the same tokens and the same traffic."""
    counted = ["budget", "eviction", "tokens_equal", "agreement", "hit_ratio"]
    counted += ["bytes_moved"]
    with monkeypatch.context() as patch:
        count = alive(patch)
        together = me.compare(tiny_model(), **GIVEN)
        assert count == {"now": 0, "most": 2, "made": 2}
    with monkeypatch.context() as patch:
        patch.setattr(case_engines, "free_device_bytes", lambda: 1000)
        count = alive(patch)
        in_turn = me.compare(tiny_model(), **GIVEN)
        # lru lfu, lfu (still there) lru, and once more for the agreement.
        assert count == {"now": 0, "most": 1, "made": 4}
    assert together[counted].equals(in_turn[counted])
    assert together["tokens_equal"].all() and (in_turn["tokens_per_s"] > 0).all()


@pytest.mark.parametrize(
    "budgets, free, fits",
    [
        (["40%", "40%"], None, True),
        *slow((["40%", "40%"], 10**9, True), (["40%"], 0, True)),
        *slow((["auto", "auto"], 10**9, False)),  # the second one gets what is left
        (["40%", "1MiB"], 2**20, False),  # a tenth stays free
        *slow((["40%", "1MiB"], 2**21, True)),
    ],
)
def test_engines_are_together_where_their_slots_fit(budgets, free, fits, monkeypatch):
    monkeypatch.setattr(case_engines, "free_device_bytes", lambda: free)
    warmed = []
    cases = [(budget, {}) for budget in budgets]
    given = tiny_model(), cases, lambda case, _: warmed.append(case)
    with CaseEngines(*given) as engines:
        assert engines[0] is engines[0]
        assert (engines.together, warmed) == (fits, [0])


def test_compare_refuses_a_share_before_the_resident_engine_runs(monkeypatch):
    monkeypatch.setattr(compare, "run_resident", lambda *_: pytest.fail("it ran"))
    with pytest.raises(me.CapacityError, match="the minimum is 2 slots"):
        me.compare(tiny_model(), budgets=["1%"])
    with pytest.raises(me.ConfigError, match="horizon 99 exceeds the model's"):
        me.compare(tiny_model(), budgets=["auto"], horizon=99)
    with pytest.raises(me.CapacityError, match="prompt and new tokens are up to 1003"):
        me.compare(tiny_model(), prompts=[[1, 2, 3]], max_new_tokens=1000)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("budget", "write budgets, a list"),
        ("device_memory", "write budgets, a list"),
        ("eviction", "write evictions, a list"),
        ("predictor", "write predictors, a list"),
        ("route", "write routes, a list"),
        ("prompt", "write prompts, a list"),
        ("max_tokens", "write max_new_tokens"),
        ("max_batch", "prompts run one after another"),
        ("round", "did you mean rounds[?]"),
        ("horizons", "did you mean horizon[?]"),
    ],
)
def test_compare_says_what_to_write_instead(name, hint):
    message = f"compare has no argument '{name}': {hint}; its arguments are model, evi"
    with pytest.raises(me.ConfigError, match=message):
        me.compare(tiny_model(), **{name: 1})


def test_compare_knows_its_own_arguments():
    own = list(inspect.signature(me.compare).parameters)
    assert list(compare._ARGUMENTS) == own[:-1]  # the last one is **options


def test_plot_tells_two_predictors_apart_without_the_resident_row():
    table = pandas.DataFrame(
        {"budget": ["25%", "25%"], "eviction": "lru", "route": "topk"}
        | {"predictor": ["none", "previous"], "hit_ratio": 0.5}
    )
    assert _labels(table) == ["25% none (50% hits)", "25% previous (50% hits)"]
    first = {"budget": "resident", "hit_ratio": None}
    first |= dict.fromkeys(("eviction", "predictor", "route"), "")
    both = pandas.DataFrame([first, *table.to_dict("records")])
    assert _labels(both) == ["resident", *_labels(table)]
    alike = _labels(table.assign(predictor="none"))
    assert alike == 2 * ["25% lru (50% hits)"]


@pytest.mark.slow
def test_resident_engine_runs_before_this_process_opens_the_device():
    """On a GPU who opens it takes most of its memory."""
    code = (
        "import sys, moe_edge as me\n"
        "from moe_edge.engine.inline import has_started\n"
        "from moe_edge.public import compare\n"
        "def run(*_):\n"
        "    sys.exit(7 if has_started() else 5)\n"
        "compare.run_resident = run\n"
        "me.compare(sys.argv[1], budgets=['auto', '2MiB', 0.5], predictors=['none',"
        " 'stale_gate'])"
    )
    done = subprocess.run([sys.executable, "-c", code, tiny_folder()], timeout=300)
    assert done.returncode == 5


@pytest.mark.slow
def test_resident_child_gets_what_is_left_and_says_what_helps(monkeypatch, tmp_path):
    """This process has started JAX."""
    seen = {}
    run = subprocess.run

    def watched(*args, env, **kwargs):
        seen.update(env)
        return run(*args, env=env, **kwargs)

    monkeypatch.setattr(resident_run.subprocess, "run", watched)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    resident()
    model = me.load(tiny_folder())
    model.source = str(tmp_path / "nothing")
    with pytest.raises(me.ConfigError, match="call compare before anything else runs"):
        resident_run.run_resident(model, [[3]], 2, 1)
    assert seen["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    with pytest.raises(me.ConfigError):
        resident_run.run_resident(model, [[3]], 2, 1)
    assert seen["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true", "the user's own"
