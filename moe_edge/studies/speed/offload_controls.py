"""What a machine adds to an offloaded step, measured on a resident engine.

An emulated link shares cores and memory with the model, and a host that plans every
layer reads every layer's routing. These controls pay for that alone: no lookup, no
prediction, no miss.
"""

import time
from collections import deque

import numpy as np

from moe_edge.offload.link import EmulatedLink, Link
from moe_edge.studies.speed.decode import greedy_steps
from moe_edge.studies.speed.offload_runs import decode_run


def step_after_waits(engine, prompts, steps: int, wait_s: float) -> float:
    """Mean seconds of a resident engine's step that rests after every layer, less that.

    What the same computation costs a processor that has been idle for so long: other
    programs, and on a virtual machine other machines, have had its caches meanwhile.
    """
    rested_s = [0.0]

    def rest(layer, routing):
        routing.ids_TK.block_until_ready()
        if wait_s > 0:
            started = time.perf_counter()
            time.sleep(wait_s)
            rested_s[0] += time.perf_counter() - started

    return (greedy_steps(engine, prompts, steps, rest) - rested_s[0]) / steps


def step_beside_transfers(
    engine,
    manager,
    prompts,
    steps: int,
    link: EmulatedLink,
    blocks_per_step: float,
    forced: bool = False,
) -> float:
    """Mean seconds of a resident step that reads every routing while blocks travel.

    A layer waits for no block of its own; at most half the slots are on their way. The
    blocks still travelling after the last step are waited for, and counted.

    Args:
      engine: resident; all its layers have experts.
      manager: of an offloaded engine, whose slots are emptied.
      link: of the transfers.
      blocks_per_step: how many, spread evenly over the layers.
      forced: see `decode_run`.
    """
    queue, spec = manager.queue, manager.spec
    blocks = spec.num_layers * spec.num_experts
    stride = spec.num_experts + 1  # another layer and another expert each time
    underway, asked, calls = deque(), 0, 0

    def read_and_ask(layer, routing):
        nonlocal asked, calls
        np.asarray(routing.ids_TK)
        queue.poll()
        calls += 1
        while asked + 1 <= blocks_per_step * calls / spec.num_layers:
            if len(underway) >= spec.num_slots // 2:
                queue.wait([underway.popleft()])
            block = divmod(asked * stride % blocks, spec.num_experts)
            slot = asked % spec.num_slots
            underway.append(queue.request(*block, slot, "demand"))
            asked += 1

    manager.empty()  # the cache knows nothing of what is written below
    queue.link = EmulatedLink(link.bytes_per_s, link.latency_s)
    try:
        run = decode_run(engine, prompts, steps, forced=forced, on_routing=read_and_ask)
        waited_s = queue.wait(underway)
    finally:
        queue.link = Link()
    return float(run.step_s.mean()) + waited_s / steps
