"""Scheduling policies of token serving by name."""

import dataclasses
from typing import Any

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.continuous_one_k import ContinuousOneK
from moe_edge.schedule.elastic import Elastic
from moe_edge.schedule.fifo import Fifo
from moe_edge.schedule.full_batch import FullBatch
from moe_edge.schedule.policy import SchedulePolicy
from moe_edge.schedule.qos import Qos

_TO_THE_END = (Fifo, FullBatch, Qos)  # as in the paper
_EACH_STEP = (Continuous, ContinuousOneK, Elastic)
POLICIES = {kind.name: kind for kind in (*_TO_THE_END, *_EACH_STEP)}


def get_policy(
    name: str,
    *,
    max_batch: int = 8,
    max_wait_s: float = 1.0,
    own_k: int | None = None,
    costs: StepCosts | None = None,
) -> SchedulePolicy:
    """The policy called `name`; it takes of the options those that it has.

    Args:
      max_batch: requests that run at a time.
      max_wait_s: what the policy may let a request wait.
      own_k: experts a token of the model itself.
      costs: seconds of its steps.
    Raises:
      ConfigError: an unknown name (the known ones are listed), an option that it needs
        and did not get, or a bad value.
    """
    check_known("scheduling policy", name, POLICIES)
    given = {
        "max_batch": max_batch,
        "max_wait_s": max_wait_s,
        "own_k": own_k,
        "costs": costs,
    }
    fields = dataclasses.fields(POLICIES[name])
    taken: dict[str, Any] = {field.name: given[field.name] for field in fields}
    if missing := [option for option, value in taken.items() if value is None]:
        raise ConfigError(
            f"policy {name} got no {', '.join(missing)}; costs are measured by "
            "moe-edge profile_machine --checkpoint"
        )
    return POLICIES[name](**taken)
