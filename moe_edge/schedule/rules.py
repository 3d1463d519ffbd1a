"""What the request loop refuses of a policy, in one line that names it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in_result import is_whole, wrong_result
from moe_edge.schedule.policy import Job, Lane, Scheduler

# The form of what a policy of others returns.


def check_number(policy: Scheduler, number: Any) -> None:
    """Raises ConfigError for what is no number of a lane."""
    if not is_whole(number):
        raise wrong(policy, "assign", number, "the number of a lane")


def check_place(policy: Scheduler, place: Any, most: int) -> None:
    """Raises ConfigError for what is no place in a queue."""
    if not is_whole(place) or not 0 <= place <= most:
        raise wrong(policy, "place", place, f"an index from 0 to {most}")


def check_decision(policy: Scheduler, found: Any) -> None:
    """Raises ConfigError for what is no Decision of numbers."""
    fits = isinstance(found, tuple) and len(found) == 3
    fits = fits and isinstance(found[0], Sequence) and isinstance(found[1], Mapping)
    again_s = found[2] if fits else None
    if fits and again_s is not None:
        fits = isinstance(again_s, (int, float, np.number))
    pairs = [*found[0], *found[1].items()] if fits else []
    fits = fits and all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and is_whole(pair[0])
        and (pair[1] is None or is_whole(pair[1]))
        for pair in pairs
    )
    if not fits:
        expected = "a Decision([(id, K), ...], {id: K}, again_s) of whole ids and K"
        raise wrong(policy, "pick", found, expected)


def wrong(policy: Scheduler, method: str, got: Any, expected: str) -> ConfigError:
    """What a method returned is of another form."""
    return wrong_result(f"policy {policy.name}", method, got, expected)


# The rules that every policy keeps.


def no_lane(policy: Scheduler, job: Job, number: int, lanes: int) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} assigned request {job.id} to lane {number}, expected 0 "
        f"to {lanes - 1}"
    )


def not_waiting(policy: Scheduler, id: int, lane: Lane) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} admitted request {id}, which does not wait in lane "
        f"{lane.number}"
    )


def not_running(policy: Scheduler, id: int, lane: Lane) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} gave a K to request {id}, which does not run in lane "
        f"{lane.number}"
    )


def over_budget(policy: Scheduler, lane: Lane) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} filled lane {lane.number} with caches of "
        f"{lane.kv_bytes()} bytes, the budget is {lane.budget_bytes}"
    )


def over_batch(policy: Scheduler, lane: Lane) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} runs {len(lane.running)} requests in lane "
        f"{lane.number}, its max_batch is {policy.max_batch}"
    )


def below_floor(policy: Scheduler, job: Job, k: int | None) -> ConfigError:
    return ConfigError(
        f"policy {policy.name} gave request {job.id} K {k}, its floor is {job.floor}"
    )
