"""Suite `placement`: seconds of the placers, gaps of heuristics, simulated latency.

Statistics are Zipf-1 over a layer's blocks, half of it in an order that all servers
share. Shapes: 26 layers of 64 blocks (DeepSeek-V2-Lite), like the placements studied.
"""

import dataclasses
import functools
import itertools

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from moe_edge.bench.rounds import interleave_seconds
from moe_edge.bench.speed import Rows, make_row, speed_study
from moe_edge.core.checks import ConfigError
from moe_edge.hardware.clusters import mixed_cluster
from moe_edge.hardware.cost_model import CostModel
from moe_edge.hardware.models import model_shape
from moe_edge.papers.prism.studies.speed_simulate import SimulateSettings, simulate_rows
from moe_edge.place.optimal import best_cover
from moe_edge.place.placer import get_placer, listed_placers
from moe_edge.place.problem import Problem, Traffic
from moe_edge.place.run_place import compare, place_all

MODEL = "deepseek_v2_lite"
KINDS = ("rtx_4090", "rtx_4060_ti", "rtx_3090")  # the last behind a slow line
HEURISTICS = ("uniform", "redundance", "smartmoe", "eplb_heterogeneous")
HEURISTICS += ("prism", "greedy", "latency")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementSettings(SimulateSettings):
    """How much suite `placement` does; `SimulateSettings` names the rest.

    Attributes:
      layers, experts: of the model.
      limit_s: servers -> seconds that the optimum, and our placer, may take.
      lp_servers: up to so many servers the linear program runs next to it.
      gap_servers, ratios, seeds: cases of the gap rows; memory in all / one copy.
    """

    layers: int = 26
    experts: int = 64
    limit_s: dict[int, float] = dataclasses.field(
        default_factory=lambda: {3: 1.0, 16: 1.0, 256: 20.0}
    )
    lp_servers: int = 16
    gap_servers: tuple[int, ...] = (3, 16)
    ratios: tuple[float, ...] = (1.05, 1.25, 1.5, 2.0)
    seeds: int = 3


def placement_rows(settings: PlacementSettings, _work_dir) -> Rows:
    """Times of the optimum and of our placer, gaps of every heuristic in %, then the
    simulator's speed and our placer's latency in it; no checkpoint is read."""
    rows = []
    for servers, limit_s in settings.limit_s.items():
        rows += time_rows(servers, limit_s, settings)
    cases = settings.gap_servers, settings.ratios, (False, True)
    for servers, ratio, unequal in itertools.product(*cases):
        rows += gap_rows(servers, ratio, unequal, settings)
    return rows + simulate_rows(settings)


def zipf(servers: int, sizes: PlacementSettings, seed: int) -> np.ndarray:
    """float64 [N, L, E], rows sum to 1."""
    rng = np.random.default_rng(seed)
    base_E = 1 / np.arange(1, sizes.experts + 1)
    common_LE = rng.permuted(np.tile(base_E, (sizes.layers, 1)), axis=1)
    own_NLE = rng.permuted(np.tile(base_E, (servers, sizes.layers, 1)), axis=2)
    frequency_NLE = (common_LE + own_NLE) / 2
    return frequency_NLE / frequency_NLE.sum(axis=-1, keepdims=True)


def memory(servers: int, blocks: int, ratio: float, unequal: bool, seed: int):
    """Slots of one GPU a server, `ratio` copies of the model in all."""
    rng = np.random.default_rng(seed)
    share_N = rng.uniform(0.3, 1.7, servers) if unequal else np.ones(servers)
    exact_N = share_N / share_N.sum() * blocks * ratio
    slots_N = np.maximum(np.floor(exact_N).astype(int), 1)
    short = int(np.ceil(blocks * ratio)) - slots_N.sum()
    slots_N[np.argsort(slots_N - exact_N)[: max(short, 0)]] += 1
    return [np.array([slots]) for slots in slots_N]


def problem_of(
    servers: int, ratio: float, unequal: bool, sizes: PlacementSettings, seed: int
) -> Problem:
    """Equal A100s, or three sorts of which one is behind a slow line; one GPU each."""
    kinds = KINDS if unequal else ("a100_40g",)
    cluster = mixed_cluster(
        [(kinds[n % len(kinds)],) for n in range(servers)],
        slow_servers=range(2, servers, 3) if unequal else (),
        expert_memory_share=1.0,
    )
    shape, frequency_NLE = model_shape(MODEL), zipf(servers, sizes, seed)
    return Problem(
        frequency_NLE,
        memory(servers, frequency_NLE[0].size, ratio, unequal, seed),
        CostModel(cluster, shape.block, shape.dense),
        seed=seed,
        traffic=Traffic(shape.top_k),
    )


def time_rows(servers: int, limit_s: float, sizes: PlacementSettings) -> Rows:
    """Tight unequal memory, the hardest case for coverage."""
    problem = problem_of(servers, 1.05, True, sizes, seed=0)
    value_NM = problem.frequency_NLE.reshape(servers, -1)
    capacity_N = np.minimum([s.sum() for s in problem.slots], problem.num_blocks)
    cases = {
        "optimal": functools.partial(best_cover, value_NM, capacity_N),
        "latency": functools.partial(get_placer("latency").solve, problem),
    }
    if servers <= sizes.lp_servers:
        cases["lp"] = functools.partial(linear_program, value_NM, capacity_N)
    runs = interleave_seconds(cases, sizes.repeats)
    name = f"{servers} x {sizes.layers} x {sizes.experts}"
    return [
        make_row(
            f"seconds/optimal {name}",
            runs["optimal"],
            "s",
            peer=runs.get("lp"),
            peer_name="linear program, SciPy HiGHS",
            limit=limit_s,
        ),
        make_row(f"seconds/latency {name}", runs["latency"], "s", limit=limit_s),
    ]


def linear_program(value_NM: np.ndarray, capacity_N: np.ndarray) -> float:
    """The same optimum by SciPy's HiGHS: the largest value of a cover."""
    N, M = value_NM.shape
    rows = [
        sparse.kron(sparse.eye_array(N), np.ones((1, M))),
        -sparse.kron(np.ones((1, N)), sparse.eye_array(M)),
    ]
    result = linprog(
        -value_NM.ravel(),
        A_ub=sparse.vstack(rows).tocsr(),
        b_ub=np.concatenate([capacity_N, -np.ones(M)]),
        bounds=(0, 1),
        method="highs",
    )
    return -result.fun


def gap_rows(
    servers: int, ratio: float, unequal: bool, sizes: PlacementSettings
) -> Rows:
    """Gap of every heuristic's objective to the optimum, %, one figure a seed."""
    gaps: dict[str, list[float]] = {name: [] for name in HEURISTICS}
    for seed in range(sizes.seeds):
        problem = problem_of(servers, ratio, unequal, sizes, seed)
        placed = place_all(problem, listed_placers(HEURISTICS))
        for name, row in compare(placed, problem).items():
            if not row["objective"] or row["gap_pct"] is None:  # the optimum is 0
                raise ConfigError(
                    f"{servers} servers with {ratio}x memory hold everything"
                )
            gaps[name].append(row["gap_pct"])
    kind = "unequal" if unequal else "equal"
    return [
        make_row(f"gap/{name} {servers} {kind} {ratio}x", values, "%")
        for name, values in gaps.items()
    ]


STUDY = speed_study(
    "placement",
    "How fast are the placers, how far from the optimum are heuristics, and what does "
    "that give in the simulator?",
    placement_rows,
    settings=PlacementSettings,
    limit="Seconds and gaps: made-up statistics, Zipf-1 over a layer's blocks, half of "
    "it in an order that all servers share; gaps are of eq. 2. Latencies: simulated, "
    "routing from a fitted generator; ratios only.",
)
