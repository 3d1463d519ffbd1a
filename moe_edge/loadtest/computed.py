"""Requests in computed time: the loop, and what its steps cost."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.loadtest.decisions_file import LoopMade
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    check_floors,
    offered_requests,
)
from moe_edge.loadtest.results import Results
from moe_edge.schedule.decisions import Recorder
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import Scheduler
from moe_edge.schedule.request import Request
from moe_edge.serve.options import LONGEST_CONTEXT, ServingOptions
from moe_edge.simulate.serving import ComputedServer, SlotSteps


def computed_results(
    checkpoint: str | None, load: LoadOptions, options: ServingOptions, dry_run: bool
) -> Results | None:
    """Serves a load without an engine; None of a dry run.

    Args:
      checkpoint: whose K and context are taken; None: those of costs and options.
    Raises:
      ConfigError: no costs, or caches of an unknown model.
    """
    costs = options.step_costs()
    if costs is None:
        raise ConfigError(
            "--target computed needs --costs, a machine.json of "
            "moe-edge profile_machine --checkpoint"
        )
    own_k, context = round(costs.decode.ks[-1]), options.max_context or LONGEST_CONTEXT
    budget, row_bytes = math.inf, _nothing
    if checkpoint is not None:
        config = open_checkpoint(checkpoint).config.with_cache(options.kv_cache)
        options.check_model(config)
        own_k, context = config.moe.top_k, options.context(config.max_positions)
        budget, row_bytes = _caches(options, config, context)
    elif options.kv_memory is not None:
        raise ConfigError(
            f"--kv_memory {options.kv_memory} of computed time needs --checkpoint: "
            "caches are the model's"
        )
    check_floors(load.floors, own_k)
    requests = offered_requests(load, context)
    made = LoopMade.of(
        options,
        max_context=context,
        own_k=own_k,
        kv_budget_bytes=budget,
        costs=costs,
    )
    if dry_run:
        return None
    floor = options.default_min_k or own_k
    jobs = offered_jobs(requests, floor, row_bytes)
    loop = Recorder(made.loop())
    server = ComputedServer(loop, costs, steps=SlotSteps(made.sizes()))
    server.run(jobs)
    return Results.decided(made, loop.lines, served=jobs)


def _nothing(tokens: int) -> int:
    return 0


def _caches(options: ServingOptions, config, context: int):
    """(budget of running rows in bytes, tokens -> bytes of a row's cache)."""
    from moe_edge.engine.slot_programs import SlotShapes  # JAX knows their shapes
    from moe_edge.serve.options import cache_bytes_of

    shapes = SlotShapes(config, **options.sizes(context))
    return cache_bytes_of(options, shapes).running, shapes.row_bytes


def offered_jobs(
    requests: Sequence[Offered],
    default_floor: int,
    row_bytes: Callable[[int], int] = _nothing,
) -> list[Request]:
    """Requests as a loop takes them.

    Args:
      default_floor: of requests without one.
      row_bytes: tokens of a row -> bytes of its cache.
    """
    return [
        Request(
            each.id,
            arrival_s=each.arrival_s,
            floor=each.floor or default_floor,
            kv_bytes=row_bytes(each.prompt_tokens + each.new_tokens),
            prompt_tokens=each.prompt_tokens,
            new_tokens=each.new_tokens,
        )
        for each in requests
    ]


def served_at(
    rate: float,
    requests: Sequence[Offered],
    policy: Scheduler,
    costs: StepCosts,
    sizes: SlotSizes,
) -> list[Request]:
    """What becomes of requests that come `rate` times as fast; inf: all at once.

    Args:
      policy: keeps nothing between runs.
    """
    faster = [
        dataclasses.replace(each, arrival_s=each.arrival_s / rate) for each in requests
    ]
    jobs = offered_jobs(faster, round(costs.decode.ks[-1]))
    server = ComputedServer(RequestLoop(policy), costs, steps=SlotSteps(sizes))
    return list(server.run(jobs).values())
