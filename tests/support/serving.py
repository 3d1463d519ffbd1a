"""Random requests for the scheduling policies, and simple costs of steps."""

import dataclasses
import itertools

import numpy as np

from moe_edge.hardware.step_costs import CostTable, StepCosts
from moe_edge.schedule.policy import SCHEDULERS, get_scheduler
from moe_edge.schedule.request import Request

OWN_K = 32


def linear_costs(base_s: float = 0.004, pair_s: float = 1e-4) -> StepCosts:
    """A step takes a fixed time, and one for each pair of a token and an expert."""

    def table(sizes) -> CostTable:
        ks = (4, OWN_K)
        seconds = [[base_s + pair_s * size * k for k in ks] for size in sizes]
        return CostTable(tuple(sizes), ks, seconds)

    return StepCosts(table((1, 16)), table((16, 512)), "linear")


COSTS = linear_costs()


def policies(**options):
    """Every policy of the registry."""
    given = {"max_batch": 4, "max_wait_s": 0.5, "own_k": OWN_K, "costs": COSTS}
    return [get_scheduler(name, **(given | options)) for name in SCHEDULERS]


@dataclasses.dataclass
class Load:
    """Requests of a seed, some of which end early.

    Attributes:
      jobs: by arrival; answers: id -> tokens of its text; cancelled: id -> seconds.
    """

    jobs: list[Request]
    answers: dict[int, int]
    cancelled: dict[int, float]


def random_load(seed: int, count: int = 60, *, gap_s: float = 0.03) -> Load:
    """Bursts, long and short prompts, floors, deadlines and clients that go away."""
    rng = np.random.default_rng(seed)
    gaps = np.where(rng.random(count) < 0.3, 0.0, rng.exponential(gap_s, count))
    load = Load([], {}, {})
    for number, arrival_s in enumerate(np.cumsum(gaps).tolist()):
        prompt, new = int(rng.integers(1, 60)), int(rng.integers(1, 24))
        deadline = rng.random() < 0.2
        load.jobs.append(
            Request(
                number,
                arrival_s=arrival_s,
                floor=int(rng.choice([4, 8, 12, 24, OWN_K])),
                deadline_s=arrival_s + float(rng.exponential(0.4))
                if deadline
                else None,
                kv_bytes=10 * (prompt + new),
                prompt_tokens=prompt,
                new_tokens=new,
            )
        )
        if rng.random() < 0.5:
            load.answers[number] = int(rng.integers(1, new + 1))
        if rng.random() < 0.2:
            load.cancelled[number] = arrival_s + float(rng.exponential(0.3))
    return load


def waiting_line(count: int, levels: int, seed: int = 0) -> list[Request]:
    """Requests that came one after another, with floors of so many levels."""
    rng = np.random.default_rng(seed)
    floors = rng.integers(1, levels + 1, count).tolist()
    sizes = rng.integers(8, 256, (count, 2)).tolist()
    return [
        Request(i, arrival_s=1e-3 * i, floor=k, prompt_tokens=p, new_tokens=n)
        for i, k, (p, n) in zip(itertools.count(), floors, sizes)
    ]
