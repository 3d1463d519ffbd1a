"""Our placer: the least predicted latency, not the least frequency of remote calls.

Eq. 2 counts remote calls alike. Time does not: a slow link makes a call dear, a call
next to another of the same layer is nearly free, and who holds the only copy decides
how far everybody else's calls go. `latency_model` predicts seconds, `Search` descends
on them: proposals from marginal seconds, kept if they help.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import check_count, check_from_zero
from moe_edge.core.plug_in import register
from moe_edge.papers.prism.prism import Prism
from moe_edge.place.greedy import cover_greedily, favourites
from moe_edge.place.latency_model import LatencyModel, costs_of
from moe_edge.place.migrate import settle
from moe_edge.place.optimal import best_cover, too_many
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Problem

SMOOTH = 0.7  # blend of the model that is descended on first (`latency_model`)
FEWEST_STEPS = 7  # however many servers
FEW = 30  # steps
TIGHT = 1.25  # copies of the model that fit
TRIES = 7  # proposals of a descent before it gives up
SMALLEST_GAIN = 1e-6  # of the predicted seconds, for a step to count
SMALLEST_SHARE = 0.01  # of the blocks that are free in a small step
FREE = 0.2  # share from which nothing to move means that there is nothing


@register
@dataclasses.dataclass(frozen=True)
class LatencyAware(Placer):
    """Minimises the predicted seconds of a mean request.

    Steps of: the marginal seconds of every block on every server; each server takes
    its most valuable blocks, coverage is repaired where it is cheapest; the proposal is
    kept if it lowers the prediction. First on a smooth form of the prediction, from the
    optimum of eq. 2, from Prism's placement and from the current one, if any; then on
    the prediction itself, from the best of all these.

    Attributes:
      steps: proposals of each descent, over the number of servers, so that the time
        stays alike.
      horizon_requests: over how many requests the copy of a block that moves is spread,
        where there is a current placement; 0 lets blocks move for nothing.
      locality: what a request whose calls all stay at home is worth beyond the
        prediction, over the seconds of its experts. Placements that are predicted
        alike differ much in how many calls leave, and what no prediction knows makes
        those dearer.
    """

    name: ClassVar[str] = "latency"
    SOURCE: ClassVar[str] = "ours, for Prism's eq. 1"
    needs: ClassVar[tuple[str, ...]] = ("cost_model",)
    steps: int = 280
    horizon_requests: float = 1000.0
    locality: float = 0.4

    def __post_init__(self):
        check_count("steps", self.steps)
        check_from_zero("locality", self.locality)
        check_from_zero("horizon_requests", self.horizon_requests)

    def unfit(self, problem: Problem) -> str | None:
        return super().unfit(problem) or too_many(self.name, len(problem.slots))

    def assign(self, problem: Problem) -> Placement:
        placement = super().assign(problem)
        if problem.current is None:
            return placement
        return settle(problem.current, placement, problem.slots)

    def choose(self, problem: Problem) -> np.ndarray:
        model = LatencyModel.of(problem)
        shape = problem.frequency_NLE.shape
        value_NM = problem.frequency_NLE.reshape(len(problem.slots), -1)
        fewest = best_cover(value_NM, problem.capacity_N).reshape(shape)
        starts = [fewest, Prism().choose(problem)]
        here_NLE = problem.frequency_NLE / problem.frequency_NLE.sum()
        calls_N = model.server_seconds(fewest) - model.rest_N
        stay_NLE = self.locality * float(model.weight_N @ calls_N) * here_NLE
        if problem.current is not None and self.horizon_requests:
            starts.append(problem.current.on_NLE)
            load_N11 = costs_of(problem).mean_load_s()[:, None, None]
            stay_NLE += problem.current.on_NLE * load_N11 / self.horizon_requests
        rng = np.random.default_rng(problem.seed)
        search = Search(model, problem.capacity_N, stay_NLE)
        steps = max(FEWEST_STEPS, self.steps // len(problem.slots))
        model.blend = SMOOTH
        smooth = [search.run(start_NLE, steps, rng) for start_NLE in starts]
        model.blend = 0.0
        best_NLE = min([*starts, *smooth], key=search.seconds)
        return search.run(best_NLE, steps, rng)


def propose(value_NLE: np.ndarray, capacity_N: np.ndarray) -> np.ndarray:
    """bool [N, L, E]: each server's most valuable blocks, coverage repaired."""
    value_NM = value_NLE.reshape(len(value_NLE), -1)
    on_NM = favourites(value_NM, capacity_N)
    cover_greedily(value_NM, on_NM)
    return on_NM.reshape(value_NLE.shape)


def block_values(model: LatencyModel, on_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E]: what holding a block is worth to all requests.

    A new copy of a block serves others once, however many servers could take it: only
    the server where it is worth most beyond what it would replace counts that.
    """
    own_NLE, others_NLE = model.marginals(on_NLE)
    both_NLE = own_NLE + others_NLE
    if not others_NLE.any():
        return both_NLE
    N = len(on_NLE)
    spare_NLE = on_NLE & (on_NLE.sum(axis=0) > 1)
    held_NM = np.where(spare_NLE, both_NLE, np.inf).reshape(N, -1)
    price_N = held_NM.min(axis=1)
    price_N[np.isinf(price_N)] = 0.0
    net_NLE = np.where(on_NLE, -np.inf, both_NLE - price_N[:, None, None])
    best_NLE = net_NLE == net_NLE.max(axis=0)
    return np.where(on_NLE | best_NLE, both_NLE, own_NLE)


class Search:
    """Descends on a prediction; every proposal takes one of the steps.

    Args:
      model: what is minimised.
      capacity_N: blocks that each server holds.
      stay_NLE: seconds that holding a block is worth beyond the prediction.
    """

    def __init__(
        self, model: LatencyModel, capacity_N: np.ndarray, stay_NLE: np.ndarray
    ):
        self.model, self.capacity_N, self.stay_NLE = model, capacity_N, stay_NLE
        self.steps = 0

    def run(
        self, on_NLE: np.ndarray, steps: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Large steps, then small ones (of `rng`), so many `steps` in all.

        The start covers every block within the capacities.
        """
        self.steps = steps
        return self.refine(self.descend(on_NLE), rng)

    def seconds(self, on_NLE: np.ndarray) -> float:
        """The prediction less what held blocks are worth beyond it."""
        return self.model.seconds(on_NLE) - float(self.stay_NLE[on_NLE].sum())

    def descend(self, on_NLE: np.ndarray) -> np.ndarray:
        """Large steps: all servers choose again, until that lowers nothing any more.

        A proposal that fails is repeated with a larger bonus for blocks that stay.
        """
        best_s, failed = self.seconds(on_NLE), 0
        # Where memory is tight nearly every block is an only copy: large steps fail,
        # and there may be few to lose.
        tight = self.capacity_N.sum() < TIGHT * on_NLE[0].size and self.steps < FEW
        bonus = 32.0 if tight else 0.0
        value_NLE = None
        while self.steps and failed < TRIES:
            self.steps -= 1
            if value_NLE is None:
                value_NLE = block_values(self.model, on_NLE) + self.stay_NLE
                unit = float(np.median(np.abs(value_NLE)))
            new_NLE = propose(value_NLE + bonus * unit * on_NLE, self.capacity_N)
            if (new_NLE == on_NLE).all():
                break
            new_s = self.seconds(new_NLE)
            if new_s < best_s - SMALLEST_GAIN * abs(best_s):
                on_NLE, best_s, value_NLE = new_NLE, new_s, None
                bonus, failed = bonus / 3, 0
            else:
                bonus, failed = max(4 * bonus, 0.5), failed + 1
        return on_NLE

    def refine(self, on_NLE: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Small steps: a random share of the blocks is free to move.

        Steps take turns: only copies stay, too, or may move. The share of each kind
        halves after a failure and doubles after a success; a kind that finds nothing
        to move rests until the other one moves something.
        """
        best_s = self.seconds(on_NLE)
        share = {True: 1.0, False: 0.25}
        idle = {True: False, False: False}
        value_NLE = None
        while self.steps and not all(idle.values()):
            self.steps -= 1
            if value_NLE is None:
                value_NLE = block_values(self.model, on_NLE) + self.stay_NLE
                only_NLE = on_NLE & (on_NLE.sum(axis=0) == 1)
            copies = self.steps % 2 == 0
            if idle[copies]:
                copies = not copies
            stays_NLE = rng.random(on_NLE.shape[1:]) >= share[copies]
            stays_NLE = stays_NLE | (only_NLE & copies)
            frozen_NLE = np.where(on_NLE, np.inf, -np.inf)
            worth_NLE = np.where(stays_NLE, frozen_NLE, value_NLE)
            new_NLE = propose(worth_NLE, self.capacity_N)
            idle[copies] = (new_NLE == on_NLE).all() and share[copies] >= FREE
            new_s = best_s if idle[copies] else self.seconds(new_NLE)
            if new_s < best_s - SMALLEST_GAIN * abs(best_s):
                on_NLE, best_s, value_NLE = new_NLE, new_s, None
                idle = {True: False, False: False}
                share[copies] = min(2 * share[copies], 1.0)
            else:
                share[copies] = max(share[copies] / 2, SMALLEST_SHARE)
        return on_NLE
