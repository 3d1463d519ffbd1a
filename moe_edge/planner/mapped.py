"""The engine that offloads nothing and maps its files (`--weights mapped`), in a plan.

It is tried where a CPU's memory holds the pages of all experts and not both copies of
them and slots for all.
"""

import numpy as np

from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware.specs import Gpu
from moe_edge.planner.calibrate import Protocol
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.computed import compute_s
from moe_edge.planner.described import Described
from moe_edge.planner.estimate import MOST_LIKELY, Estimate, exactly, within
from moe_edge.planner.host_memory import expert_bytes
from moe_edge.planner.live import Live
from moe_edge.planner.quality import ONE, Range

CANDIDATE = Candidate(OffloadOptions(), weights="mapped")
MEASURED_NOTE = (
    "weights mapped was measured in a process whose programs are those of offloaded "
    "engines, where its steps may take longer; these read mapped files, too"
)


def timed(live: Live, protocol: Protocol) -> tuple[np.ndarray, np.ndarray]:
    """float64 [batches] each: seconds of a step, and to the first token."""
    prompts, rows = protocol.prompts, live.batch
    given = protocol.new_tokens, protocol.sampling
    step_s, ttft_s = [], []
    with live.mapped() as engine:
        warm_up(engine, prompts[:rows], *given)
        for first in range(0, len(prompts), rows):
            own = prompts[first : first + rows]
            ids = range(first, first + len(own))
            new, sampling = given
            found = generate(engine, own, new, sampling=sampling, row_ids=ids)
            step_s.append(found.decode_s / found.steps)
            ttft_s.append(found.ttft_s)
    return np.array(step_s), np.array(ttft_s)


def measured_estimate(live: Live, protocol: Protocol) -> Estimate:
    """What it took here; ranges are of other prompts, as those of a replay."""
    tpot_s, ttft_s = map(_spread, timed(live, protocol))
    return _estimate(live, tpot_s, ttft_s)


def computed_estimate(live: Described, gpu: Gpu, tokens: int) -> Estimate:
    """What it would take by a machine's roofline.

    Args:
      tokens: of a prompt.
    """
    return _estimate(live, *map(exactly, compute_s(live, gpu, tokens)))


def measured_of(live: Live, protocol: Protocol) -> dict[str, float | None]:
    """A run by the keys of an estimate, those of which nothing is known left None."""
    step_s, ttft_s = timed(live, protocol)
    tpot_s = float(step_s.mean())
    own = _estimate(live, exactly(tpot_s), exactly(float(np.median(ttft_s))))
    found = {name: r and r[1] for name, r in vars(own).items()}
    unknown = "host_bytes", "mapped_bytes", "ppl_ratio", "agreement"
    return found | dict.fromkeys(unknown)


def _spread(seconds: np.ndarray) -> Range:
    count = len(seconds)
    error = float(np.std(seconds, ddof=1)) * (2 / count) ** 0.5 if count > 1 else 0.0
    return within(float(seconds.mean()), MOST_LIKELY * error)


def _estimate(live: Described, tpot_s: Range, ttft_s: Range) -> Estimate:
    low, middle, high = tpot_s
    return Estimate(
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        tokens_per_s=(live.batch / high, live.batch / middle, live.batch / low),
        device_bytes=exactly(live.needs(CANDIDATE.options).other_bytes),
        host_bytes=exactly(0),
        mapped_bytes=exactly(expert_bytes(live)),
        hit_ratio=None,
        ppl_ratio=ONE,
        agreement=ONE,
    )
