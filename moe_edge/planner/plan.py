"""Makes a plan: calibrates, replays candidates, chooses, verifies, says why."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.files import write_json
from moe_edge.engine.auto_memory import auto_memory
from moe_edge.engine.device_memory import device_memory_bytes, free_device_bytes
from moe_edge.engine.load import prepare_process
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_fits_model
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.planner import verify as verifying
from moe_edge.planner.asked import (
    check_context,
    check_fixed,
    fitting,
    given_trace,
    with_budget,
    with_timed_mode,
)
from moe_edge.planner.calibrate import NONE, Calibrated, Protocol, calibrate
from moe_edge.planner.candidates import Refused, Space, space_of
from moe_edge.planner.choose import judge, ranked
from moe_edge.planner.costs import ModelCosts
from moe_edge.planner.described import Described
from moe_edge.planner.elsewhere import check_elsewhere, is_elsewhere, plan_elsewhere
from moe_edge.planner.estimate import PLAIN, Subject
from moe_edge.planner.host_memory import MMAP, PAGES_NOTE, wants_mapped, with_memory
from moe_edge.planner.live import Live
from moe_edge.planner.machine_file import machine_json, stored_costs
from moe_edge.planner.mapped import CANDIDATE, MEASURED_NOTE, measured_estimate
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.prompts import sampled_prompts
from moe_edge.planner.quality import admitted
from moe_edge.planner.search import search
from moe_edge.planner.servers import check_servers, plan_servers
from moe_edge.planner.summary import Plan, summed_up
from moe_edge.planner.variants import variants
from moe_edge.workload.trace_writer import write_trace

PROMPTS = 16  # a sampled prompt's misses differ by 5 to 12 % from another's
NEW_TOKENS = 32  # of a calibration, at most
VERIFY_SEED = 1000  # beside the user's: other prompts


def check(
    asked: PlanOptions, base: OffloadOptions, fixed: frozenset
) -> tuple[OffloadOptions, Sequence[str | float], list[Refused], bool]:
    """What a plan would refuse before it measures.

    Returns:
      the user's options with a budget, the budgets to try, those that are refused, and
      whether an engine of mapped weights is tried as well.
    """
    reader = open_checkpoint(asked.checkpoint or "default")
    check_context(asked, reader.config)
    prepare_process(reader, base)
    refuse(Asked.of(base, model=reader.config, has_rows=asked.joining))
    here = device_memory_bytes(), jax.default_backend()
    free_bytes = free_device_bytes() if here[1] == "cpu" else None
    config, room = reader.config.with_cache(asked.kv_cache), (asked.batch, asked.tokens)
    live = Described(config, reader.dtype, *room, *here, reader=reader)
    base = with_memory(asked, base, fixed, live, reader, free_bytes)
    is_whole = wants_mapped(asked, base, fixed, live, reader, free_bytes)
    stays = base.memory == MMAP
    given = asked, base, fixed
    base, budgets = with_budget(*given, lambda: auto_memory(reader, (), stays))
    base = with_timed_mode(base, jax.default_backend())
    check_fits_model(reader, base)
    refuse(Asked.of(base, has_rows=asked.joining))
    check_fixed(base, fixed)
    return *fitting(base, budgets, live, free_bytes), is_whole


def check_plan(asked: PlanOptions, base: OffloadOptions, fixed: frozenset) -> None:
    """Raises what `make_plan` would before it measures or computes."""
    if asked.servers is not None:
        check_servers(asked, base, fixed)
    elif is_elsewhere(asked):
        check_elsewhere(asked, base, fixed)
    else:
        check(asked, base, fixed)


def make_plan(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    out_dir: Path | None = None,
) -> Plan:
    """The plan of a checkpoint, on this machine or on one that is described.

    Args:
      base, fixed: of `PlanOptions.base`.
      out_dir: where it will be written; None: nowhere.
    """
    if asked.servers is not None:
        return plan_servers(asked, base, fixed, out_dir)
    if is_elsewhere(asked):
        return plan_elsewhere(asked, base, fixed, out_dir)
    base, budgets, too_large, is_whole = check(asked, base, fixed)
    checkpoint, context = asked.checkpoint or "default", asked.tokens
    room = asked.batch, context, asked.kv_cache
    # Copies might leave no room for the pages that an engine of mapped weights needs.
    live = Live(checkpoint, None, *room, MMAP if is_whole else base.memory)
    notes: list[str] = []
    qualities, refused = admitted(asked, base, fixed, checkpoint)
    given = base, fixed, live.config, [*too_large, *refused]
    space = space_of(*given, budgets=budgets, joining=asked.joining)
    protocol = protocol_of(asked, live, asked.seed, notes)
    done, entries = calibrated(asked, live, space, protocol, notes)
    space = space.without(done.left_out, done.recorded.predicted)
    own = Subject(live, done.costs, done.recorded)
    given = checkpoint, own, base, qualities, protocol, context
    with variants(*given) as (subjects, failed):
        possible = [q for q in qualities if (q.k, q.expert_dtype) in subjects]
        found = search(space, subjects, possible, asked)
        if is_whole:
            whole = judge(CANDIDATE, measured_estimate(live, protocol), asked)
            found = found._replace(judged=ranked([*found.judged, whole], asked))
            notes.append(MEASURED_NOTE)
        rows: list[dict[str, Any]] = []
        if asked.verify:
            other = protocol_of(asked, live, asked.seed + VERIFY_SEED, [])
            wanted = found.judged[: 1 + asked.verify_top]
            rows = verifying.verify(wanted, subjects, other)
    for name in done.left_out:
        reason = f"the calibration's {asked.calibrate_s:g} s were over"
        failed.append(Refused(name, reason, "raise --calibrate_s"))
    refused = [*space.refused, *failed, *found.refused]
    is_mapped = is_whole or base.memory == MMAP
    notes += _assumptions(asked, live, subjects, is_mapped)
    machine = "measured here (machine.json)" if entries else asked.machine
    sources = machine, asked.trace or "recorded here (trace.csv.gz)"
    files: dict[str, Callable[[Path], None]] = {}
    if entries:
        stored = machine_json(asked.machine, entries)
        files["machine.json"] = lambda at: write_json(at, stored)
    if asked.trace is None:
        trace = done.recorded.trace
        files["trace.csv.gz"] = lambda at: write_trace(at, trace, with_scores=True)
    return summed_up(asked, found, rows, refused, notes, *sources, files, out_dir)


def protocol_of(
    asked: PlanOptions, live: Live, seed: int, notes: list[str]
) -> Protocol:
    """How a plan's prompts are decoded; says of the prompts what they are."""
    count = -(-PROMPTS // live.batch) * live.batch
    given = live.reader, count, asked.prompt_tokens, seed, asked.prompts
    prompts, kind = sampled_prompts(*given)
    new = min(asked.new_tokens, NEW_TOKENS)
    notes.append(
        f"prompts: {kind}, {count} of {asked.prompt_tokens} tokens, {new} new ones each"
    )
    return Protocol(
        prompts=prompts,
        new_tokens=new,
        sampling=verifying.sampling_of(asked),
        limit_s=asked.calibrate_s,
    )


def calibrated(
    asked: PlanOptions, live: Live, space: Space, protocol: Protocol, notes: list[str]
) -> tuple[Calibrated, dict[str, dict[str, Any]]]:
    """Costs and routing, measured or read; what of it a machine file will keep."""
    given = given_trace(asked, live.config, notes)
    content, k = live.reader.content_sha256(), live.config.moe.top_k
    costs: ModelCosts | None = None
    if asked.machine is not None:
        costs = stored_costs(asked.machine, content, k, live.batch)
    recorded = None if given is None else given.in_batches(live.batch)
    if costs is not None and recorded is not None:
        if costs.temperature != asked.temperature:
            notes.append(
                f"the machine's calibration decoded at temperature "
                f"{costs.temperature:g}, the plan is for {asked.temperature:g}"
            )
        return Calibrated(costs, recorded, []), {}
    base = plain(space.base)
    predictors = {}
    if recorded is None:  # predictions are of the lookups that are recorded here
        for each in space.values["predictor"]:
            own = each["predictor"] == space.base.predictor
            options = space.base.predictor_options if own else {}
            changed = {**each, "predictor_options": options}
            predictors[each["predictor"]] = dataclasses.replace(base, **changed)
    assists = [each["assist"] for each in space.values["assist"] if each["assist"]]
    done = calibrate(live, base, predictors, assists, protocol)
    if recorded is not None:
        done = done._replace(recorded=recorded)
    return done, {content: {str(k): done.costs.to_json()}}


def plain(options: OffloadOptions) -> OffloadOptions:
    """What a calibration runs: the budget, slot plan and link, with the policies that
    costs are measured beside; all engines then write the same tokens."""
    own = {"eviction": PLAIN, "predictor": NONE, "route": "topk", "assist": None}
    empty = {f"{name}_options": {} for name in own}
    return dataclasses.replace(options, **own, **empty, assist_expert_s=None)


def _assumptions(
    asked: PlanOptions, live: Live, subjects, is_mapped: bool
) -> list[str]:
    found = [
        f"decoding at temperature {asked.temperature:g}, batch {live.batch}; other "
        "prompts are like these",
        "mode layered, one device",
    ]
    if asked.temperature == 0:
        found.append(
            "greedy decoding of a small model may repeat itself: its misses differ by "
            "20 to 60 % between prompts, so only the ranges count"
        )
    if is_mapped:
        found.append(PAGES_NOTE)
    if asked.kv_cache != "float32":
        found.append(
            f"keys and values are kept in {asked.kv_cache}; what that costs in "
            "fidelity is not counted"
        )
    if len(subjects) > 1:
        found.append(
            "other formats and K choose the experts that the model as it is chose, and "
            "predictors add to them what they add to it"
        )
    for path in asked.card:
        found.append(f"card {path}: what it says of its text holds for other texts")
    return found
