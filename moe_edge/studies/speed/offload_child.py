"""A process that loads a checkpoint, decodes a little and says its peak memory.

python -m moe_edge.studies.speed.offload_child CHECKPOINT MEMORY BUDGET
"""

import json
import re
import resource
import sys
from pathlib import Path

import numpy as np

from moe_edge.studies.speed.offload_runs import decode_run, load_offloaded

STEPS = 8


def peak_rss_bytes() -> int:
    """Most memory this process ever occupied.

    `ru_maxrss` may start with the parent's peak, from before `exec`.
    """
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)[1]) * 1024


def measure(checkpoint: str, memory: str, budget: str) -> dict:
    """Loads, prefills and decodes; `memory` and `budget` as in `OffloadOptions`.

    Returns:
      peak_rss_bytes, slot_bytes (of the device budget) and moved blocks.
    """
    engine = load_offloaded(checkpoint, device_memory=budget, memory=memory)
    run = decode_run(engine, np.ones((1, 16), np.int32), STEPS)
    slot_bytes = engine.manager.queue.slots.num_bytes
    engine.close()
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "slot_bytes": slot_bytes,
        "used_blocks": run.used_blocks,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
