"""Plans for a machine that is not here, with or without weights."""

import time
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.auto_memory import auto_bytes
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.hardware import presets
from moe_edge.hardware.specs import Gpu
from moe_edge.planner import mapped
from moe_edge.planner.asked import (
    check_context,
    check_fixed,
    fitting,
    given_trace,
    with_budget,
)
from moe_edge.planner.candidates import Candidate, Space, space_of
from moe_edge.planner.choose import Judged, judge, ranked
from moe_edge.planner.computed import computed_costs, computed_estimate
from moe_edge.planner.described import DescribedModel, backend_of
from moe_edge.planner.estimate import Subject
from moe_edge.planner.helped import LATE_NOTE, NOTE, with_fused
from moe_edge.planner.host_memory import (
    MMAP,
    PAGES_NOTE,
    on_host,
    wants_mapped,
    with_memory,
)
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.quality import Quality, Refused, admitted, unmeasured
from moe_edge.planner.recorded_routing import SOURCE
from moe_edge.planner.replayed import Recorded
from moe_edge.planner.search import Found, search
from moe_edge.planner.summary import Plan, summed_up


def is_elsewhere(asked: PlanOptions) -> bool:
    """Whether a plan is for a machine that cannot be measured now."""
    preset = asked.machine is not None and not asked.machine.endswith(".json")
    return asked.config_json is not None or preset


def check_elsewhere(
    asked: PlanOptions, base: OffloadOptions, fixed: frozenset[str]
) -> tuple[Gpu, DescribedModel, OffloadOptions, Sequence[str | float], list[Refused]]:
    """What a plan would refuse before it computes.

    Returns:
      the machine, the model, the user's options with a budget, the budgets to try, and
      those that are refused.
    Raises: as of `plan_elsewhere`.
    """
    if asked.verify:
        raise ConfigError(
            f"--verify runs on this machine, and the plan is for {asked.machine}; "
            "leave --verify or --machine out"
        )
    gpu = presets.gpu(str(asked.machine))
    model = DescribedModel(asked)
    check_context(asked, model.config)
    refuse(Asked.of(base, model=model.config, has_rows=asked.joining))
    check_fixed(base, fixed)
    live, free_bytes = model(gpu), _cpu_bytes(gpu)
    base = with_memory(asked, base, fixed, live, None, free_bytes)
    copied = 0 if free_bytes is None else on_host(base, live)[0]
    auto = f"{auto_bytes(gpu.device.memory_bytes, copied)}B"
    base, budgets = with_budget(asked, base, fixed, lambda: auto)
    return gpu, model, *fitting(base, budgets, live, free_bytes)


def _cpu_bytes(gpu: Gpu) -> int | None:
    """Memory of a machine that is a CPU, of whose models a config alone is known (a
    checkpoint is planned here); None: it is a GPU."""
    return gpu.device.memory_bytes if backend_of(gpu) == "cpu" else None


def plan_elsewhere(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    out_dir: Path | None,
) -> Plan:
    """The plan of a model by its config: exact bytes, computed times.

    Args: as of `make_plan`.
    Raises:
      ConfigError: an unknown machine, or what cannot be asked of one that is not here.
      CapacityError: a budget of too few slots (the least is named).
    """
    gpu, model, base, budgets, too_large = check_elsewhere(asked, base, fixed)
    live, on_gpu = model(gpu), backend_of(gpu) == "gpu"
    fused = on_gpu and asked.trace is not None
    qualities, refused = admitted(asked, base, fixed, asked.model_path, fused)
    given = base, fixed, live.config, [*too_large, *refused]
    space = space_of(*given, budgets=budgets, joining=asked.joining)
    notes = [
        "nothing was measured: bytes are exact, times are those of the machine's "
        f"roofline ({gpu.device.source}; link: {gpu.host_link.source})"
    ]
    trace = given_trace(asked, live.config, notes)
    if trace is None:
        notes.append(SOURCE)
        if base.assist is not None:
            notes.append(f"times are without assist {base.assist}: give --trace")
        found = _computed(asked, space, model, gpu, qualities, budgets)
        space_refused = [r for r in space.refused if not r.what.startswith(_REPLAYED)]
        space_refused.append(
            Refused(
                "eviction, predictor, assist",
                "which is best only routing says, and none is known",
                "give --trace (moe-edge generate --trace on a machine that runs it)",
            )
        )
    else:
        if fused:
            space = with_fused(space, fixed, live, asked.joining)
            helped = any(own.get("assist_in_fused") for own in space.values["assist"])
            late = any("assist_deferred" in each.options for each in qualities)
            notes += [NOTE] * helped + [LATE_NOTE] * late
        together = trace.in_batches(asked.batch)
        found = _replayed(asked, space, model, gpu, qualities, together)
        space_refused = [*space.refused]
    if wants_mapped(asked, base, fixed, live, None, _cpu_bytes(gpu)):
        whole = mapped.computed_estimate(live, gpu, asked.prompt_tokens)
        judged = [*found.judged, judge(mapped.CANDIDATE, whole, asked)]
        found = found._replace(judged=ranked(judged, asked))
        notes.append(PAGES_NOTE)
    elif base.memory == MMAP:
        notes.append(PAGES_NOTE)
    refusals = [*space_refused, *found.refused]
    sources = asked.machine, asked.trace
    return summed_up(asked, found, [], refusals, notes, *sources, {}, out_dir)


_REPLAYED = ("eviction", "predictor", "assist", "slot_plan")


def _computed(
    asked: PlanOptions,
    space: Space,
    model: DescribedModel,
    gpu: Gpu,
    qualities: Sequence[Quality],
    budgets: Sequence[str | float],
) -> Found:
    """Formats, K and budgets; what formats cost in fidelity no card says."""
    begun_s, refused, judged = time.perf_counter(), [], []
    for quality in [*qualities, *unmeasured(qualities, model.config)]:
        for budget in budgets:
            try:
                live = model(gpu, quality.k, quality.expert_dtype)
                chosen = {"device_memory": {"device_memory": budget}}
                candidate: Candidate = space.candidate(quality, **chosen)
                found = computed_estimate(candidate, live, gpu, asked.prompt_tokens)
            except (ConfigError, CapacityError) as error:
                refused.append(Refused.by(f"{quality.label} at {budget}", error))
                continue
            judged.append(judge(candidate, found, asked))
    order: list[Judged] = ranked(judged, asked)
    return Found(order, refused, 0, time.perf_counter() - begun_s)


def _replayed(
    asked: PlanOptions,
    space: Space,
    model: DescribedModel,
    gpu: Gpu,
    qualities: Sequence[Quality],
    trace: Recorded,
) -> Found:
    """The candidates of a space, with the roofline's costs."""
    subjects = {}
    for quality in qualities:
        key = quality.k, quality.expert_dtype
        live = model(gpu, *key)
        costs = computed_costs(live, gpu, space.base, asked.prompt_tokens)
        subjects[key] = Subject(live, costs, trace.at_k(quality.k))
    return search(space, subjects, qualities, asked)
