"""Requests to an engine in this process, each at its time."""

import math
import time
from collections.abc import Sequence

from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.progress import counter
from moe_edge.engine.devices import device_options
from moe_edge.engine.load import (
    check_checkpoint,
    check_weights,
    open_run,
    prepare_process,
)
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.loadtest.decisions_file import LoopMade
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    block_tokens,
    check_floors,
    offered_requests,
)
from moe_edge.loadtest.prompts import Prompts, text_ids
from moe_edge.loadtest.results import Results
from moe_edge.schedule.decisions import Recorder
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver
from moe_edge.serve.loading import check_room, load_driver
from moe_edge.serve.options import ServingOptions


def engine_results(
    checkpoint: str,
    load: LoadOptions,
    options: ServingOptions,
    offload: OffloadOptions | None,
    dry_run: bool,
    devices: int | str | None = None,
) -> Results | None:
    """Loads a model and serves a load; None of a dry run.

    Raises:
      MoeEdgeError: a checkpoint or options that cannot be served.
    """
    options.step_costs()  # missing ones show before weights are read
    check_checkpoint(checkpoint)
    rounded = {"activations": options.activations, "kv_cache": options.kv_cache}
    reader = open_run(checkpoint, **rounded)
    prepare_process(reader, offload)
    own_k, longest = reader.config.moe.top_k, reader.config.max_positions
    options.check_model(reader.config)
    check_room(checkpoint, None, offload, options, reader.config, devices)
    shared = device_options(devices)
    shared.check(reader, offload)
    if options.weights != "copied":  # asks JAX for its devices
        check_weights(options.weights, reader, offload, shared.mesh(reader, offload))
    check_floors(load.floors, own_k)
    context = options.context(longest)
    requests = offered_requests(load, context)
    if dry_run:
        return None
    ids = text_ids(load_tokenizer(reader), load.data_dir)
    prompts = Prompts(ids, block_tokens(load), load.seed)
    prompts = [prompts(each) for each in requests]
    clock = Clock()
    given = checkpoint, None, offload, options
    driver = load_driver(*given, devices=devices, clock=clock)
    with driver.slots.engine:
        print(f"ready after {clock():.1f} s; {len(requests)} requests", flush=True)
        made = LoopMade.of(
            options,
            max_context=context,
            own_k=own_k,
            kv_budget_bytes=driver.loop.limits.kv_budget_bytes,
            costs=options.step_costs(),
        )
        recorder = driver.loop = Recorder(driver.loop)
        floor = options.default_min_k or own_k
        with counter("serving requests"):
            served, late_s, failure = serve(driver, clock, requests, prompts, floor)
    notes = [failure] if failure else []
    lines = recorder.lines
    return Results.decided(made, lines, served=served, late_s=late_s, notes=notes)


class Clock:
    """Seconds from the start of a load."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """The load begins now."""
        self._start_s = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start_s


def serve(
    driver: Driver,
    clock: Clock,
    requests: Sequence[Offered],
    prompts: Sequence[tuple[int, ...]],
    default_floor: int,
) -> tuple[list[Request], list[float], str | None]:
    """Serves requests as they come, until the last has ended.

    Args:
      driver: its clock is `clock`.
      default_floor: of requests without one.
    Returns:
      (the requests, seconds that each was handed over later than it could have
      been: one that comes in a step waits for its end; what the first failed step
      raised).
    """
    served, late_s, failure, free_s = [], [], None, 0.0
    clock.restart()
    while len(served) < len(requests) or driver.is_busy:
        while len(served) < len(requests):
            request, now_s = requests[len(served)], clock()
            if request.arrival_s > now_s:
                break
            late_s.append(now_s - max(request.arrival_s, free_s))
            asked = Request(
                prompt=prompts[request.id],
                new_tokens=request.new_tokens,
                floor=request.floor or default_floor,
            )
            served.append(driver.submit(asked, request.arrival_s))
        stepped = driver.step()
        if stepped is not None:
            free_s = clock()
            if stepped.error is not None and failure is None:
                failure = f"{type(stepped.error).__name__}: {stepped.error}"
            continue
        next_s = driver.wake_s
        if len(served) < len(requests):
            next_s = min(next_s, requests[len(served)].arrival_s)
        if math.isfinite(next_s):
            time.sleep(max(next_s - clock(), 0.0))
    return served, late_s, failure
