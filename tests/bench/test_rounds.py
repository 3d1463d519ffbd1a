"""The loop of all timed studies: who is called when, and what is kept."""

import itertools

from moe_edge.bench.rounds import (
    ON_TIME,
    interleave,
    measure_rounds,
    round_order,
    round_ratios,
)


def test_every_case_sees_every_input_once_a_round_after_the_warm_calls():
    calls = []
    cases = {
        name: lambda given, name=name: calls.append((name, given)) or f"{name}{given}"
        for name in "ab"
    }
    found = measure_rounds(cases, [1, 2], warm=[0])
    assert found.figures == {"a": ["a1", "a2"], "b": ["b1", "b2"]}
    assert found["b"] == ["b1", "b2"]
    assert calls[:2] == [("a", 0), ("b", 0)]
    assert calls[2:] == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_orders_differ_in_who_comes_first_and_in_who_comes_before_whom():
    for count in (1, 2, 3, 4, 5):
        orders = [round_order(range(count), n) for n in range(2 * count)]
        assert all(sorted(order) == list(range(count)) for order in orders)
        assert {order[0] for order in orders} == set(range(count))
        if count > 2:
            before = {
                (one, later) for o in orders for one, later in itertools.pairwise(o)
            }
            assert all((later, one) in before for one, later in before)


def test_programs_compiled_after_the_warm_calls_are_counted():
    compiled = []
    cases = {"a": lambda given: compiled.append(1) if given != 1 else None}
    count = compiled.__len__
    assert measure_rounds(cases, [1, 1], warm=[0], num_compiled=count).checks() == {
        ON_TIME: True
    }
    late = measure_rounds(cases, [1, 2], num_compiled=count)
    assert late.compiled_late == 1 and late.checks() == {ON_TIME: False}


def test_interleave_drops_one_call_of_each_case():
    numbers = {name: itertools.count() for name in "abc"}
    cases = {name: lambda n=n: next(n) for name, n in numbers.items()}
    assert interleave(cases, 3) == {name: [1, 2, 3] for name in "abc"}


def test_ratios_are_of_rounds_not_of_medians():
    ours, peer = [2.0, 9.0, 3.0], [1.0, 3.0, 3.0]
    assert round_ratios(ours, peer) == [2.0, 3.0, 1.0]
