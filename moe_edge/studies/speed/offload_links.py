"""Time per token over emulated links, compared with its bound and with its replay.

A standard link loads one expert in 0.5, 2 or 8 times a layer's resident compute, of
which 50 us are latency. The bound of the oracle row is max(resident compute, needed
bytes / rate + transfers x latency); that of a real predictor is what
`simulate.replay_time` says of the lookups and predictions of that very run, with the
same link and the resident engine's compute. Two more rows a link say how much of the
distance is this machine's (`offload_controls`).
"""

import functools
import statistics

import numpy as np

from moe_edge.engine.load import load_engine
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.policy import get_policy
from moe_edge.simulate.replay.timed import replay_time
from moe_edge.simulate.replay.timing import CostModel
from moe_edge.studies.rounds import interleave
from moe_edge.studies.speed.decode import random_prompts
from moe_edge.studies.speed.offload_controls import (
    step_after_waits,
    step_beside_transfers,
)
from moe_edge.studies.speed.offload_runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    Replayed,
    Run,
    RunLog,
    check_same_tokens,
    decode_run,
    foreseen,
    layer_share,
    load_offloaded,
    trace_of,
)
from moe_edge.studies.speed.suite import MS, Rows, make_row

LATENCY_S = 50e-6
BAR = 1.10
PREDICTORS = ("none", "stale_gate", "smoe_partial", "previous")
# All experts of the next three layers: while one layer waits for its last block, the
# link always has others to go on with.
HORIZON, PREFETCH_LIMIT = 3, 24


def link_for(load_s: float, block_bytes: int) -> EmulatedLink:
    """The link that carries one block's bytes in `load_s`, the latency on top."""
    return EmulatedLink(block_bytes / load_s, LATENCY_S)


def link_rows(
    name: str, folder, settings: OffloadSettings, predictors, forced: bool = False
) -> Rows:
    """Rows of one model at the three links: the oracle, these predictors, controls.

    Args:
      name, folder: of the model.
      predictors: of PREDICTORS, `none` among them: it records what the oracle knows.
      forced: see `decode_run`.
    """
    run = functools.partial(decode_run, forced=forced)
    resident = load_engine(folder, with_tokenizer=False).engine
    prompts = random_prompts(resident, 1, PROMPT_TOKENS)
    options = {predictor: {"predictor": predictor} for predictor in predictors}
    if "smoe_partial" in options:  # all that the next layer would choose
        options["smoe_partial"]["predictor_options"] = {"top_a": None}
    engines = {
        predictor: load_offloaded(folder, device_memory=SHARE, **given)
        for predictor, given in options.items()
    }
    # The longest run: the shorter ones are its beginning.
    recorded = run(engines["none"], prompts, max(settings.link_steps.values()))
    future = foreseen(recorded, resident.config.moe.num_experts)
    oracle = {"predictor": "oracle", "predictor_options": {"chosen_SLK": future}}
    oracle |= {"horizon": min(HORIZON, resident.config.num_layers)}
    oracle = load_offloaded(
        folder, device_memory=SHARE, prefetch_limit=PREFETCH_LIMIT, **oracle
    )
    engines = {"oracle": oracle, **engines}
    share, rows = layer_share(resident, prompts, settings.host_steps), []
    for ratio, steps in settings.link_steps.items():
        decode = functools.partial(run, prompts=prompts, steps=steps)
        runs, link = _rounds(decode, resident, engines, settings.repeats, share, ratio)
        case = f"{name}, 25 %, emulated link {ratio:g}x"
        found = {
            predictor: _row(
                f"{case}, {predictor}", predictor, engine, runs, link, share
            )
            for predictor, engine in engines.items()
        }
        rows += found.values()
        rows.append(_beside_row(found["oracle"], runs["beside"]))
        rows.append(_rested_row(found["none"], resident, prompts, steps))
    for engine in engines.values():
        engine.close()
    return rows


def _rounds(decode, resident, engines, repeats: int, share, ratio: float):
    """Runs of the resident engine and all others in turn, and their link.

    Case `beside` holds seconds a step, of the oracle's number of transfers.
    """
    compute = decode(resident)
    layer_s = share * float(np.median(compute.step_s)) / resident.config.num_layers
    manager = engines["oracle"].manager
    link = link_for(ratio * layer_s, manager.queue.store.block_bytes)
    cases = {"resident": functools.partial(decode, resident)}
    for name, engine in engines.items():
        cases[name] = functools.partial(decode, engine, link=link)
    first = cases["oracle"]()
    cases["beside"] = functools.partial(
        step_beside_transfers,
        resident,
        manager,
        link=link,
        blocks_per_step=first.used_blocks / len(first.step_s),
        **decode.keywords,
    )
    runs = interleave(cases, repeats)
    for name in engines:
        check_same_tokens(name, runs[name][-1], compute)
    return runs, link


def _row(case: str, predictor: str, engine, runs, link: EmulatedLink, share) -> dict:
    """One predictor at one link."""
    is_oracle, bounds, needed, late = predictor == "oracle", [], [], []
    for run, resident in zip(runs[predictor], runs["resident"], strict=True):
        resident_s = float(resident.step_s.mean())
        costs = _costs(engine, resident_s, share, link)
        played = _replay(engine, run, costs, None if is_oracle else run.log)
        blocks = min(run.used_blocks, played.misses) if is_oracle else run.used_blocks
        needed.append(blocks / len(run.step_s))
        link_s = needed[-1] * link.seconds(costs.block_bytes)
        bounds.append(max(resident_s, link_s) if is_oracle else played.tpot_s)
        late.append(run.waited_s / len(run.step_s))
    ours = [float(run.step_s.mean()) for run in runs[predictor]]
    return make_row(
        case,
        [MS * value for value in ours],
        "ms/token",
        peer=[MS * value for value in bounds],
        peer_name="bound: compute or link" if is_oracle else "replay",
        bar=BAR,
        emulated=True,
        needed_blocks_per_token=statistics.median(needed),
        waited_ms_per_token=MS * statistics.median(late),
        resident_ms_per_token=MS
        * statistics.median(float(run.step_s.mean()) for run in runs["resident"]),
        link=link.describe(),
    )


def _beside_row(row: dict, beside_s: list[float]) -> dict:
    """The oracle's runs compared with what this machine makes of its bound.

    The oracle row's bound is a step that nothing disturbs, or the link alone. Here the
    resident engine reads every layer's routing back, as a host that plans does, while
    as many blocks are copied over the link by the same cores. It explains that row and
    has no bar of its own.
    """
    return make_row(
        f"{row['case']}, read-backs and copies",
        row["runs"]["ours"],
        "ms/token",
        peer=[MS * value for value in beside_s],
        peer_name="a resident step that reads each routing while as many blocks travel",
        emulated=True,
        link=row["link"],
    )


def _rested_row(row: dict, resident, prompts, steps: int) -> dict:
    """The same run against its replay plus what waiting costs the resident engine.

    The replay counts a layer's compute as it is when nothing ever waits. How much of a
    missed bar is the machine's, which computes slower after a wait, this row tells.
    """
    wait_s = row["waited_ms_per_token"] / MS / resident.config.num_layers
    extra = [
        step_after_waits(resident, prompts, steps, wait_s)
        - step_after_waits(resident, prompts, steps, 0.0)
        for _ in row["runs"]["ours"]
    ]
    slower_ms = MS * max(0.0, statistics.median(extra))
    return make_row(
        f"{row['case']}, compute after waits",
        row["runs"]["ours"],
        "ms/token",
        peer=[bound + slower_ms for bound in row["runs"]["peer"]],
        peer_name="replay + what a resident step loses by waiting as long",
        bar=BAR,
        emulated=True,
        lost_by_waiting_ms_per_token=slower_ms,
        link=row["link"],
    )


def _costs(engine, resident_s: float, share: float, link: EmulatedLink) -> CostModel:
    """Of the resident engine in one round.

    Only the sum of a layer's experts and the next one's routing matters: nothing
    happens on the host between them. So the layer is cut in the middle.
    """
    layer_s = share * resident_s / engine.config.num_layers
    return CostModel(
        route_s=layer_s / 2,
        experts_s=layer_s / 2,
        block_bytes=engine.manager.queue.store.block_bytes,
        link=link,
        step_s=(1 - share) * resident_s,
    )


def _replay(engine, run: Run, costs: CostModel, log: RunLog | None):
    """A run's lookups in computed time, with its predictions or without any."""
    manager = engine.manager
    return replay_time(
        trace_of(run, manager.spec.num_experts),
        get_policy("lru"),
        manager.spec.layer_S,
        costs,
        None if log is None else Replayed(log.predicted),
        1 if log is None else manager.predictor_run.horizon,
        manager.prefetcher.limit,
    )
