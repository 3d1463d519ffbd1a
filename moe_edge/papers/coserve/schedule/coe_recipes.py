"""What CoServe, ours and the baselines are made of: a queue, an eviction, a layout."""

from collections.abc import Sequence
from typing import NamedTuple

from moe_edge.core.checks import chosen
from moe_edge.papers.coserve.schedule.affinity import Affinity
from moe_edge.papers.coserve.schedule.coserve import Arranged, CoServe, InTurn


class Recipe(NamedTuple):
    """A way to serve a collaboration of experts.

    Attributes:
      queue: who goes where and when.
      eviction: name of a pool policy.
      one_lane: one executor with all memory of the first kind, not many that share.
      tier: what leaves the pool stays in host memory as long as there is room.
      by_work: pools start with experts so that each executor has work for its speed,
        not with experts in turn.
    """

    queue: type[InTurn]
    eviction: str
    one_lane: bool = False
    tier: bool = False
    by_work: bool = False


RECIPES = {
    "samba": Recipe(InTurn, "lru", one_lane=True, tier=True),
    "samba_no_tier": Recipe(InTurn, "lru", one_lane=True),
    "samba_fifo": Recipe(InTurn, "fifo", one_lane=True, tier=True),
    "samba_parallel": Recipe(InTurn, "lru"),
    "none": Recipe(InTurn, "fifo"),
    "em": Recipe(InTurn, "coserve"),
    "em_ra": Recipe(Arranged, "coserve"),
    "coserve": Recipe(CoServe, "coserve"),
    "coserve_queued": Recipe(CoServe, "coserve_queued"),
    "affinity": Recipe(Affinity, "queued", by_work=True),
}


def chosen_recipes(text: str) -> Sequence[str]:
    """Names of recipes separated by commas, or `all`; ConfigError: an unknown one."""
    names = chosen("policy", text, RECIPES)
    return list(RECIPES) if names is None else names
