"""What processes say to the scheduler: what is malformed is theirs, a fault is ours."""

import pytest

from moe_edge.cluster.scheduler.asked import Asked, NobodyLeft
from moe_edge.cluster.scheduler.said import SAID, is_well_formed
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.scheduler.serving import Holders, Serving
from moe_edge.core.checks import RequestError

GOOD = {
    "warm": {"seconds": 1.5},
    "token": {"id": 3, "token": 4, "done": False},
    "failed": {"id": 3, "error": "too long"},
    "lost": {"who": 1, "kind": "dead"},
    "reached": {"who": 1, "reached": True},
    "arrived": {"order": 2, "own": [[1, 5], [2, 0]]},
    "confirmed": {"version": 7},
}


class Nobody:
    """A transport that reaches nobody."""

    def post(self, *told):
        pass

    def disconnect(self, peer):
        pass


@pytest.fixture
def scheduler():
    return Scheduler(Nobody(), None, 2)


@pytest.mark.parametrize("name", SAID)
def test_fields_that_are_missing_or_of_another_type_are_malformed(name):
    good = GOOD.get(name, {})
    assert is_well_formed(name, good | {"more": None})
    if "own" not in good:
        assert is_well_formed(name, good | {"own": 5})
    for key, value in good.items():
        without = {k: v for k, v in good.items() if k != key}
        assert not is_well_formed(name, without)
        other = "x" if not isinstance(value, str) else 1
        assert not is_well_formed(name, without | {key: other})
    if name == "reached":
        assert not is_well_formed(name, good | {"reached": 1})
    if name == "token":
        assert not is_well_formed(name, good | {"done": 1})
        assert not is_well_formed(name, good | {"id": True})


@pytest.mark.parametrize("own", [[1], [[1]], [[1, "2"]], [[1, 2, 3]], [[True, 2]]])
def test_blocks_that_are_no_cells_are_malformed(own):
    assert not is_well_formed("arrived", {"order": 2, "own": own})


def test_what_means_nothing_is_refused(scheduler):
    with pytest.raises(RequestError, match="process 2 says 'dance', which means"):
        scheduler.control(2, "dance", {}, {})


def test_malformed_warm_loses_its_server_while_all_start(scheduler, capsys):
    scheduler.control(2, "warm", {"seconds": 1.0}, {})
    scheduler.control(1, "warm", {"seconds": "many"}, {})
    with pytest.raises(NobodyLeft, match="server 0 is hung before all have begun"):
        scheduler.wait_for_all("warm", 5.0, may_lose=False)
    assert "server 0 says 'warm' {'seconds': 'many'}; it is lost" in (
        capsys.readouterr().err
    )
    assert scheduler.alive == [1]


def test_fault_of_ours_in_a_run_is_loud_and_loses_nobody(scheduler):
    holders = Holders()
    holders.actions = {"confirmed": lambda *_: {}["a key of ours"]}
    asked = [Asked(0, "a", 0, "words", 0.0, [1], 4)]
    scheduler.control(1, "confirmed", {"version": 1}, {})
    with pytest.raises(KeyError, match="a key of ours"):
        Serving(scheduler, holders, asked, None).run()
    assert scheduler.alive == [0, 1]
