"""Which schedulers a server takes: names, classes and objects, and what it refuses."""

import dataclasses

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.fifo import Fifo
from moe_edge.schedule.loop import NO_LIMITS
from moe_edge.schedule.policy import NOTHING, Scheduler
from moe_edge.serve.options import ServingOptions, make_loop
from moe_edge.serve.run_serve import run_serve
from tests.support.serving import COSTS
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@dataclasses.dataclass(frozen=True)
class Patient(Scheduler):
    max_batch: int = 8
    own_k: int = 0
    patience_s: float = 1.0
    name = "patient"

    def pick(self, lane, now_s):
        return NOTHING


class Endless(Scheduler):
    name = "endless"

    def pick(self, lane, now_s):
        return NOTHING


def policy_of(policy, costs=None, **options):
    given = ServingOptions(policy=policy, max_batch=4, **options)
    return make_loop(given, 32, NO_LIMITS, costs).policy


def test_server_fills_the_fields_that_it_has():
    assert policy_of("fifo") == Fifo(4)
    assert policy_of(Fifo, policy_options={"max_batch": 2}) == Fifo(2)
    assert policy_of(Patient) == Patient(4, 32)
    options = {"patience_s": 2.0, "own_k": 8}
    assert policy_of(Patient, policy_options=options) == Patient(4, 8, 2.0)
    own = Continuous(3)
    assert policy_of(own) is own
    assert policy_of("qos", COSTS, max_wait_s=0.5).max_wait_s == 0.5


@pytest.mark.parametrize(
    "policy, options, text",
    [
        (Fifo(5), None, "fifo has max_batch 5, and 4 rows run at a time; raise the se"),
        ("fifo", {"max_batch": 9}, "fifo has max_batch 9, and 4 rows run at a time"),
        (Endless(), None, "endless has max_batch 0, and 4 rows run at a time"),
        (
            "fifo",
            {"patience_s": 1},
            "fifo has no option 'patience_s'; known: max_batch",
        ),
        (
            Fifo(2),
            {"max_batch": 1},
            "fifo was given as an object and policy_options ma",
        ),
        (Patient, {"patience_s": "x"}, "patience_s is 'x', expected a number"),
        (
            "qos",
            None,
            "qos got no costs; costs are measured by moe-edge profile_machin",
        ),
        (Scheduler, None, "expected a name .*, or an object or subclass of Scheduler"),
    ],
)
def test_server_refuses(policy, options, text):
    with pytest.raises(ConfigError, match=text):
        policy_of(policy, policy_options=options)


def test_servers_in_other_processes_refuse_a_policy_without_a_name(tmp_path):
    given = {"checkpoint": str(write_tiny_checkpoint(tmp_path / "tiny")), "servers": 2}
    given |= {"dry_run": True, "max_batch": 4, "max_context": 64}
    for policy in (Fifo(2), Patient):
        with pytest.raises(
            ConfigError, match="and servers in processes of their own know names alone"
        ):
            run_serve(policy=policy, **given)
    assert run_serve(policy="fifo", **given)["dry_run"] is True
