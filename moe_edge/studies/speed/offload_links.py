"""Time per token over emulated links, compared with its bound and with its replay.

A standard link loads one expert in 0.5, 2 or 8 times a layer's resident compute, of
which 50 us are latency. The bound of the oracle row is max(resident compute, needed
bytes / rate + transfers x latency), where neighbours are one transfer; that of a real
predictor is what `simulate.replay_time` says of the lookups and predictions of that
very run, with the same link and the resident engine's compute. Two more rows a link say
how much of the distance is this machine's.
"""

import functools
import statistics
from collections.abc import Sequence

import numpy as np

from moe_edge.bench.engines import Bench
from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Rows, make_row
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.config import ModelConfig
from moe_edge.offload.evict_base import get_eviction
from moe_edge.simulate.replay.lookups import chosen_by_step
from moe_edge.simulate.replay.recorded import Replayed
from moe_edge.simulate.replay.timed import CostModel, TimedResult, replay_time
from moe_edge.studies.speed.runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    TimedRun,
    check_same_tokens,
    decode_run,
    layer_share,
    random_prompts,
    step_after_waits,
    step_beside_transfers,
)

LATENCY_S = 50e-6
BAR = 1.10
OPTIONS = {
    "none": {},
    "stale_gate": {},
    "smoe_partial": {"top_a": None},  # all that the next layer would choose
    "previous": {},
}
# All experts of the next three layers: while one layer waits for its last block, the
# link always has others to go on with.
HORIZON, PREFETCH_LIMIT = 3, 24


def foreseen(run: TimedRun, config: ModelConfig) -> np.ndarray:
    """int32 [1 + N, L, M] for `Oracle`: what the steps choose; the prompt is step 0."""
    chosen_SLM = chosen_by_step(run.log.trace(config.moe.num_experts))
    return np.pad(chosen_SLM, ((1, 0), (0, 0), (0, 0)), constant_values=-1)


def link_rows(
    name: str,
    folder,
    settings: OffloadSettings,
    predictors: Sequence[str],
    forced: bool = False,
) -> Rows:
    """Rows of one model at the three links: the oracle, these predictors, controls.

    Args:
      predictors: of OPTIONS, `none` among them: it records what the oracle knows.
      forced: see `decode_run`.
    """
    rows, on_device = [], functools.partial(OffloadOptions, device_memory=SHARE)
    with Bench(folder, with_tokenizer=False) as bench:
        resident, config = bench.resident, bench.config
        prompts = random_prompts(resident, 1, PROMPT_TOKENS)
        run = functools.partial(decode_run, prompts=prompts, forced=forced)
        engines = {
            predictor: bench.engine(
                on_device(predictor=predictor, predictor_options=OPTIONS[predictor])
            )
            for predictor in predictors
        }
        # The longest run: the shorter ones are its beginning.
        recorded = run(engines["none"], steps=max(settings.link_steps.values()))
        oracle = on_device(
            predictor="oracle",
            predictor_options={"chosen_SLK": foreseen(recorded, config)},
            horizon=min(HORIZON, config.num_layers),
            prefetch_limit=PREFETCH_LIMIT,
        )
        engines = {"oracle": bench.engine(oracle)} | engines
        share = layer_share(bench.by_layer, prompts, settings.host_steps)
        for ratio, steps in settings.link_steps.items():
            decode, sizes = (
                functools.partial(run, steps=steps),
                (share, settings.repeats),
            )
            rows += _rows_at(name, ratio, bench, engines, decode, *sizes)
    return rows


def _rows_at(
    name: str, ratio: float, bench: Bench, engines, decode, share: float, repeats: int
) -> Rows:
    """Rows at one link, after rounds of the resident engine and all others in turn.

    Args:
      decode: `decode_run` of these prompts and steps.
      share: of a resident step, what its layers take.
    """
    resident, L = bench.resident, bench.config.num_layers
    compute = decode(resident)
    layer_s = share * float(np.median(compute.step_s)) / L
    link = bench.standard_link(layer_s, ratio, LATENCY_S)
    cases = {"resident": functools.partial(decode, resident)}
    for predictor, engine in engines.items():
        cases[predictor] = functools.partial(decode, engine, link=link)
    first = cases["oracle"]()
    cases["beside"] = functools.partial(
        step_beside_transfers,
        bench.by_layer,
        engines["oracle"],
        link=link,
        blocks_per_step=first.used_blocks / len(first.step_s),
        **decode.keywords,
    )
    runs = interleave(cases, repeats)
    for predictor in engines:
        check_same_tokens(predictor, runs[predictor][-1], compute)

    resident_s = [run.mean_s for run in runs["resident"]]
    # Only the sum of a layer's experts and the next one's routing matters: nothing
    # happens on the host between them. So the layer is cut in the middle.
    costs = []
    for step_s in resident_s:
        half_s = share * step_s / L / 2
        sizes = bench.store.block_bytes, link, (1 - share) * step_s
        costs.append(CostModel(half_s, half_s, *sizes))
    case = f"{name}, 25 %, emulated link {ratio:g}x"
    rows = {
        predictor: _row(f"{case}, {predictor}", engine, runs[predictor], costs)
        for predictor, engine in engines.items()
    }
    wait_s = rows["none"]["peer"] / MS - statistics.median(resident_s)
    controls = _controls(
        rows["oracle"], rows["none"], runs["beside"], wait_s, bench.by_layer, decode
    )
    extra = {
        "emulated": True,
        "resident_ms_per_token": MS * statistics.median(resident_s),
        "link": link.describe(),
    }
    return [row | extra for row in (*rows.values(), *controls)]


def _row(
    case: str, engine, runs: Sequence[TimedRun], costs: Sequence[CostModel]
) -> dict:
    """One predictor at one link; `costs`: of each round."""
    bounds, needed = [], []
    is_oracle = engine.predictor_run.predictor.name == "oracle"
    for run, cost in zip(runs, costs, strict=True):
        played = replayed(engine, run, cost, with_predictions=not is_oracle)
        blocks = min(run.used_blocks, played.misses) if is_oracle else run.used_blocks
        needed.append(blocks / len(run.step_s))
        link_s = needed[-1] * cost.link.seconds(cost.block_bytes)
        link_s -= run.merged / len(run.step_s) * cost.link.latency_s
        bounds.append(max(played.resident_s, link_s) if is_oracle else played.tpot_s)
    late_s = [run.waited_s / len(run.step_s) for run in runs]
    return make_row(
        case,
        [MS * run.mean_s for run in runs],
        "ms/token",
        peer=[MS * value for value in bounds],
        peer_name="bound: compute or link" if is_oracle else "replay",
        bar=BAR,
        needed_blocks_per_token=statistics.median(needed),
        waited_ms_per_token=MS * statistics.median(late_s),
    )


def replayed(
    engine, run: TimedRun, costs: CostModel, with_predictions: bool = True
) -> TimedResult:
    """A run's lookups in computed time, with its predictions or without any."""
    predictor, horizon = None, 1
    if with_predictions:
        predictor = Replayed(run.log.predicted)
        horizon = engine.predictor_run.horizon
    return replay_time(
        run.log.trace(engine.cache.spec.num_experts),
        get_eviction("lru"),
        engine.cache.spec.layer_S,
        costs,
        predictor,
        horizon,
        engine.layer_step.prefetch_limit,
    )


def _controls(
    oracle: dict, plain: dict, beside_s, wait_s: float, by_layer, decode
) -> Rows:
    """How much of the distance of two rows is this machine's.

    The oracle row's bound is a step that nothing disturbs, or the link alone. Here the
    resident engine reads every layer's routing back, as a host that plans does, while
    as many blocks are copied over the link by the same cores; this has no bar. And the
    replay counts a layer's compute as it is when nothing ever waits.

    Args:
      wait_s: for how long a step waits in the replay.
    """
    wait_s = max(0.0, wait_s) / by_layer.config.num_layers
    sizes = {name: decode.keywords[name] for name in ("prompts", "steps")}
    lost_s = [
        step_after_waits(by_layer, wait_s=wait_s, **sizes)
        - step_after_waits(by_layer, wait_s=0.0, **sizes)
        for _ in beside_s
    ]
    slower_ms = MS * max(0.0, statistics.median(lost_s))
    return [
        make_row(
            f"{oracle['case']}, read-backs and copies",
            oracle["runs"]["ours"],
            "ms/token",
            peer=[MS * value for value in beside_s],
            peer_name="a resident step, one program a layer, that reads each routing "
            "while as many blocks travel",
        ),
        make_row(
            f"{plain['case']}, compute after waits",
            plain["runs"]["ours"],
            "ms/token",
            peer=[bound + slower_ms for bound in plain["runs"]["peer"]],
            peer_name="replay + what a resident step loses by waiting as long",
            bar=BAR,
            lost_by_waiting_ms_per_token=slower_ms,
        ),
    ]
