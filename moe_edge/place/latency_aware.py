"""Our placer: the least predicted latency, not the least frequency of remote calls.

Eq. 2 counts remote calls alike. Time does not: a slow link makes a call dear, a call
next to another of the same layer is nearly free, and who holds the only copy decides
how far everybody else's calls go. `latency_model` predicts seconds, `latency_search`
descends on them.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import check_count, check_from_zero, one_or_each
from moe_edge.place.call_costs import Batch, CallCosts
from moe_edge.place.latency_model import LatencyModel
from moe_edge.place.latency_search import Search
from moe_edge.place.migrate import settle
from moe_edge.place.optimal import best_cover
from moe_edge.place.placer import Placer, Problem
from moe_edge.place.plan import Placement

SMOOTH = 0.7  # blend of the model that is descended on first (`latency_model`)
FEWEST_STEPS = 7  # however many servers


@dataclasses.dataclass(frozen=True)
class LatencyAware(Placer):
    """Minimises the predicted seconds of a mean request.

    From the optimum of eq. 2 (and from the current placement, if any), steps of: the
    marginal seconds of every block on every server; each server takes its most
    valuable blocks, coverage is repaired where it is cheapest; the proposal is kept if
    it lowers the prediction. First on a smooth form of the prediction, then on itself.

    Attributes:
      steps: proposals of the smooth and of the exact descent, over the number of
        servers, so that the time stays alike.
      horizon_requests: over how many requests the copy of a block that moves is spread,
        where there is a current placement; 0 lets blocks move for nothing.
    """

    name: ClassVar[str] = "latency"
    SOURCE: ClassVar[str] = "ours, for Prism's eq. 1"
    needs: ClassVar[tuple[str, ...]] = ("cost_model",)
    steps: int = 280
    horizon_requests: float = 1000.0

    def __post_init__(self):
        check_count("steps", self.steps)
        check_from_zero("horizon_requests", self.horizon_requests)

    @staticmethod
    def model(problem: Problem) -> LatencyModel:
        """The prediction for a problem with a cost model.

        Raises:
          ConfigError: numbers for another count of servers.
        """
        traffic = problem.traffic
        rate_N = traffic.requests_per_s
        if rate_N is not None:
            rate_N = one_or_each("requests_per_s", rate_N, len(problem.slots))
        return LatencyModel(
            problem.frequency_NLE,
            CallCosts.of(problem.cost_model),
            traffic.top_k,
            [Batch(traffic.prompt_tokens, 1.0), Batch(1.0, traffic.output_tokens)],
            rate_N,
        )

    def assign(self, problem: Problem) -> Placement:
        placement = super().assign(problem)
        if problem.current is None:
            return placement
        return settle(problem.current, placement, problem.slots)

    def choose(self, problem: Problem) -> np.ndarray:
        model = self.model(problem)
        shape = problem.frequency_NLE.shape
        value_NM = problem.frequency_NLE.reshape(len(problem.slots), -1)
        fewest = best_cover(value_NM, problem.capacity_N).reshape(shape)
        starts = [fewest]
        stay_NLE = np.zeros(shape)
        if problem.current is not None and self.horizon_requests:
            starts.append(problem.current.on_NLE)
            stay_NLE = (
                problem.current.on_NLE * problem.cost_model.mean_load_s()[:, None, None]
            )
            stay_NLE /= self.horizon_requests
        rng = np.random.default_rng(problem.seed)
        search = Search(model, problem.capacity_N, stay_NLE)
        steps = max(FEWEST_STEPS, self.steps // len(problem.slots))
        found = []
        for start_NLE in starts:
            model.blend = SMOOTH
            smooth_NLE = search.run(start_NLE, steps, rng)
            model.blend = 0.0
            on_NLE = min(start_NLE, smooth_NLE, key=search.seconds)
            found.append(search.run(on_NLE, steps, rng))
        return min(found, key=search.seconds)
