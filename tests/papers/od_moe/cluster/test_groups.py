"""Who computes and loads what: groups by hand, and their laws for random choices."""

import threading
import time

import numpy as np
import pytest

from moe_edge.papers.od_moe.cluster.groups import (
    Groups,
    NoWorkers,
    longest_load_s,
    slots_of,
)


@pytest.mark.parametrize(
    "top_k, workers, groups, slots",
    [
        (2, 8, 4, 1),
        (6, 4, 2, 3),
        (6, 4, 1, 2),
        (6, 4, 4, 6),
        (3, 4, 2, 2),
        (2, 8, 2, 1),
    ],
)
def test_slots_are_a_workers_share_of_a_layer(top_k, workers, groups, slots):
    assert slots_of(top_k, workers, groups) == slots
    assert Groups(workers, groups, top_k).slots == slots


def test_groups_take_turns_on_across_tokens():
    groups, layers = Groups(4, 2, 2), 3
    # Of three layers, the second token begins with the other group.
    of_tokens = [
        [groups.members(step * layers + layer) for layer in range(layers)]
        for step in range(2)
    ]
    first, second = [0, 1], [2, 3]
    assert of_tokens == [[first, second, first], [second, first, second]]


def test_shares_go_by_turns_in_the_order_of_prediction():
    groups = Groups(4, 2, 5)
    assert groups.share(0, [9, 4, 7, 1, 3]) == {0: [9, 7, 3], 1: [4, 1]}
    assert groups.share(1, [5]) == {2: [5], 3: []}
    assert groups.share(1, []) == {2: [], 3: []}


def test_choice_goes_where_it_was_loaded_and_else_where_there_is_room():
    groups = Groups(4, 2, 4)
    # Predicted: worker 2 loads 8 and 6, worker 3 loads 7 and 5. Of these 8, 6 and 7 are
    # chosen; 1 was not predicted: worker 3 has room, in the place of 5.
    assert groups.choose(1, [6, 1, 7, 8], [8, 7, 6, 5]) == {6: 2, 8: 2, 7: 3, 1: 3}
    assert groups.choose(0, [3, 2], []) == {3: 0, 2: 1}  # nothing was predicted


@pytest.mark.parametrize("workers, count, top_k", [(4, 2, 6), (8, 4, 2), (6, 2, 4)])
def test_nobody_gets_more_than_its_slots_unless_somebody_is_lost(workers, count, top_k):
    groups, rng = Groups(workers, count, top_k), np.random.default_rng(0)
    for turn in range(200):
        chosen, predicted = (rng.permutation(12)[:top_k].tolist() for _ in range(2))
        where = groups.choose(turn, chosen, predicted)
        assert sorted(where) == sorted(chosen)
        assert set(where.values()) <= set(groups.members(turn))
        assert max(np.bincount(list(where.values()))) <= groups.slots
        shares = groups.share(turn, predicted)
        assert max(map(len, shares.values())) <= groups.slots
        for expert in set(chosen) & set(predicted):
            assert expert in shares[where[expert]]


def test_lost_workers_are_passed_over():
    groups = Groups(4, 2, 4)
    groups.lose(0)
    groups.lose(0)
    assert groups.members(0) == [1] and groups.members(1) == [2, 3]
    assert groups.share(0, [5, 6, 7, 8]) == {1: [5, 6, 7, 8]}
    assert groups.choose(0, [5, 9], [5, 6]) == {5: 1, 9: 1}
    assert groups.spread(5).tolist() == [1, 2, 3, 1, 2]


def test_group_that_is_lost_as_a_whole_is_replaced_by_all_that_are_left():
    groups = Groups(4, 2, 2)
    groups.lose(2)
    groups.lose(3)
    assert groups.members(0) == groups.members(1) == [0, 1]


def test_nobody_left_is_said_in_one_line():
    groups = Groups(2, 2, 2)
    groups.lose(0)
    groups.lose(1)
    for ask in (
        lambda: groups.members(0),
        lambda: groups.share(0, [1]),
        lambda: groups.choose(0, [1], []),
        lambda: groups.spread(8),
    ):
        with pytest.raises(NoWorkers, match="all workers are lost") as error:
            ask()
        assert error.value.exit_code == 3


def test_all_take_part_in_a_prompt():
    assert Groups(3, 3, 2).spread(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_longest_load_by_hand():
    # The paper's figure 2: four groups, 4 t_M + 3 t_W.
    assert longest_load_s(2.0, 0.5, 4) == 9.5
    assert longest_load_s(2.0, 0.5, 1) == 2.0


def test_a_suspected_worker_is_passed_over_until_it_is_found_or_lost():
    groups = Groups(3, 1, 3)
    groups.suspect(1)
    groups.suspect(1)
    assert groups.left() == [0, 2]
    groups.find(1)
    assert groups.left() == [0, 1, 2]
    groups.suspect(2)
    groups.lose(2)
    groups.find(2)  # it was lost meanwhile
    groups.suspect(2)
    assert groups.left() == [0, 1]


@pytest.mark.parametrize("found", [True, False])
def test_with_none_left_but_suspected_ones_it_is_waited_for(found):
    groups = Groups(2, 1, 2)
    groups.suspect(0)
    groups.suspect(1)
    decide = groups.find if found else groups.lose

    def decide_all():
        groups.lose(0)
        decide(1)

    timer = threading.Timer(0.05, decide_all)
    timer.start()
    if found:
        assert groups.left() == [1]
    else:
        with pytest.raises(NoWorkers, match="all workers are lost"):
            groups.left()
    timer.join()


def test_a_worker_that_is_suspected_while_others_ask_is_waited_for():
    """Whatever happens between two looks at who is there."""

    class Looked(Groups):
        @property
        def alive(self):
            seen, left = self._seen, suspects.pop() if suspects else None
            if left is not None:
                thread = threading.Thread(target=self._doubt, args=[left])
                threads.append(thread)
                thread.start()
                thread.join(0.1)  # it may have to wait for who is looking
            return seen

        def _doubt(self, worker):
            self.suspect(worker)
            time.sleep(0.2)  # so long nobody knows
            self.find(worker)

        @alive.setter
        def alive(self, workers):
            self._seen = workers

    suspects: list[int] = []
    threads: list[threading.Thread] = []
    groups = Looked(1, 1, 1)
    suspects.append(0)
    assert groups.left() == [0]
    for thread in threads:
        thread.join()
