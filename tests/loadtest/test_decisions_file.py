"""Decisions in a file, made again from it alone."""

import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.loadtest.computed import computed_results
from moe_edge.loadtest.decisions_file import (
    LoopMade,
    read_decisions,
    replay_decisions,
    write_decisions,
)
from moe_edge.loadtest.offered import LoadOptions
from moe_edge.schedule.continuous import Continuous
from moe_edge.serve.options import ServingOptions
from tests.support.serving import COSTS

LOAD = LoadOptions(poisson=6.0, duration_s=10.0, floors="4:1,8:1,32:1", seed=4)


@pytest.fixture
def machine(tmp_path):
    """A machine.json with costs."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"step_costs": COSTS.to_json()}))
    return str(path)


def computed(machine, policy="elastic", load=LOAD, checkpoint=None, **options):
    given = ServingOptions(policy=policy, costs=machine, max_batch=4, **options)
    return computed_results(checkpoint, load, given, dry_run=False)


def test_a_file_is_replayed_by_itself(tmp_path, machine):
    results = computed(machine)
    assert results.is_equal and len(results.lines) > 200
    path = tmp_path / "decisions.jsonl"
    write_decisions(path, results.made, results.lines)
    (tmp_path / "machine.json").unlink()  # all that is needed is in the file
    made, lines = read_decisions(path)
    assert made == results.made and lines == results.lines
    served, differs = replay_decisions(made, lines)
    assert differs is None and len(served) == len(results.served)
    for one, computed_one in zip(served, results.served, strict=True):
        for name in ("arrival_s", "floor", "made", "k_sum", "k_least", "state"):
            assert getattr(one, name) == getattr(computed_one, name)
        assert one.admitted_s == computed_one.admitted_s
        assert one.first_s >= computed_one.first_s  # the end of its step


def test_scheduler_without_a_name_is_refused(machine):
    for policy in (Continuous(), Continuous):
        with pytest.raises(ConfigError, match="a load is made again from a name; inst"):
            computed(machine, policy=policy)


def test_options_of_a_scheduler_are_in_the_file(machine):
    results = computed(machine, "full_batch", policy_options={"max_wait_s": 0.25})
    assert results.is_equal and results.made.loop().policy.max_wait_s == 0.25


def test_the_first_decision_that_differs_is_named(machine):
    results = computed(machine, policy="continuous")
    options = results.made.options | {"policy": "continuous_one_k"}
    other = dataclasses.replace(results.made, options=options)
    served, differs = replay_decisions(other, results.lines)
    assert differs.startswith("decision ") and "recorded was" in differs
    assert 0 < len(served) <= len(results.served)


def test_computed_time_counts_caches_of_a_known_model(machine):
    load = dataclasses.replace(LOAD, length_scale=2.0, floors="4:1")
    free = computed(machine, load=load, checkpoint="default", max_context=512)
    narrow = {"max_context": 512, "kv_memory": "8MiB", "prompt_cache": "0"}
    tight = computed(machine, load=load, checkpoint="default", **narrow)
    assert tight.made.kv_budget_bytes < free.made.kv_budget_bytes
    assert tight.is_equal and free.is_equal

    def waited_s(results):
        return sum(one.admitted_s - one.arrival_s for one in results.served)

    assert waited_s(tight) > waited_s(free)


def test_computed_time_without_what_it_needs_is_refused(machine):
    with pytest.raises(ConfigError, match="--target computed needs --costs, a machine"):
        computed(None, policy="continuous")
    with pytest.raises(
        ConfigError, match="--kv_memory 1GiB of computed time needs --c"
    ):
        computed(machine, kv_memory="1GiB")
    with pytest.raises(ConfigError, match="--floors asks for K 32, the model's is 8"):
        computed(machine, checkpoint="default")
    load = dataclasses.replace(LOAD, floors="33")
    with pytest.raises(ConfigError, match="--floors asks for K 33, the model's is 32"):
        computed(machine, load=load)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty; load --decisions writes decisions"),
        ('{"t_s": 1}\n', ":1 is no line of decisions; load --decisions"),
        ('{"loop": {}}\nx\n', ":2 is not valid JSON: Expecting value at column 1"),
        ('{"loop": {}}\n', "loop lacks options"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, text, message):
    path = tmp_path / "decisions.jsonl"
    path.write_text(text)
    with pytest.raises((RequestError, ConfigError), match=message):
        read_decisions(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b'{"loop"\xff\xfe')
    with pytest.raises(RequestError, match=f"{path}:1 is not UTF-8 text: byte 7 is 0"):
        read_decisions(path)


def test_what_is_no_run_is_refused(machine):
    results = computed(machine)
    lines = ['{"t_s": 0.0, "event": "admit", "id": 7, "lane": 0, "place": 0}']
    with pytest.raises(RequestError, match=r"decisions tell of no run: KeyError\(7\)"):
        replay_decisions(results.made, lines)
    with pytest.raises(FileNotFoundError, match="--decisions nowhere does not exist"):
        read_decisions("nowhere")
    wrong = LoopMade.of(ServingOptions(), max_context=64, own_k=2)
    options = wrong.options | {"policy": "vip"}
    with pytest.raises(ConfigError, match="unknown scheduling policy 'vip'"):
        dataclasses.replace(wrong, options=options).loop()
