"""What a configuration would take: calibrated replay, as ranges with their source."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.planner.calibrate import NONE, moved
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.costs import ModelCosts, assist_key, between
from moe_edge.planner.host_memory import on_host
from moe_edge.planner.quality import Range
from moe_edge.planner.replayed import Recorded, layer_slots, play, predictor_name
from moe_edge.simulate.replay.timed import TimedResult

PLAIN = "lru"
MOST_LIKELY = 1.96  # standard errors to either side: 95 %


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What to expect of a configuration; each a range, None where nothing is known.

    Attributes:
      device_bytes: slots, and all that is no expert.
      host_bytes: of experts that the host copies, besides slots.
      mapped_bytes: of experts that stay in their files, whose pages the system may take
        back.
    """

    tpot_s: Range | None
    ttft_s: Range | None
    tokens_per_s: Range | None
    device_bytes: Range
    host_bytes: Range
    mapped_bytes: Range
    hit_ratio: Range | None
    ppl_ratio: Range | None
    agreement: Range | None

    def to_json(self) -> dict[str, list[float] | None]:
        return {n: None if r is None else list(r) for n, r in vars(self).items()}


def exactly(value: float) -> Range:
    return value, value, value


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint in one format at one K, as it was calibrated.

    Attributes:
      live: the checkpoint: `config`, `block_bytes`, `batch`, `needs`, `context`,
        `decides_on_device`.
      costs, recorded: of its calibration.
    """

    live: Any
    costs: ModelCosts
    recorded: Recorded
    _plain_s: dict = dataclasses.field(default_factory=dict, repr=False)

    def policies_s(self, options, played: TimedResult, prompts: int | None) -> float:
        """What eviction and route cost the host a step, beyond those that costs were
        measured with: the difference of the replays' own processor time.

        Args:
          played: with these options.
        """
        steps = len(played.step_s)
        key = prompts, predictor_name(options)
        if options.eviction == PLAIN and options.lossless:
            self._plain_s.setdefault(key, played.host_s / steps)
            return 0.0
        if key not in self._plain_s:
            own = {"eviction": PLAIN, "eviction_options": {}}
            own |= {"route": "topk", "route_options": {}}
            plain = dataclasses.replace(options, **own)
            again = play(self.recorded, plain, self.live, self.costs, prompts)
            self._plain_s[key] = again.host_s / steps
        return max(0.0, played.host_s / steps - self._plain_s[key])


def estimate(
    candidate: Candidate, subject: Subject, prompts: int | None = None
) -> Estimate:
    """Replays a candidate.

    Args:
      prompts: that are replayed; None: all.
    Raises:
      ConfigError, CapacityError: what the candidate needs was not measured, or its
        budget holds too few slots.
    """
    options, costs, live = candidate.options, subject.costs, subject.live
    name = predictor_name(options)
    if options.assist is not None and (
        name != NONE or assist_key(options) not in costs.assist_s
    ):
        raise ConfigError(
            f"what assist {options.assist} takes with predictor {name} is not known; "
            "use predictor none or leave the assist out, or give more --calibrate_s "
            "where the model runs"
        )
    played = play(subject.recorded, options, live, costs, prompts)
    link = costs.link(options)
    load_s = link.seconds(live.block_bytes)
    blocks, steps = moved(played), len(played.step_s)
    recorded = subject.recorded
    if prompts is not None:
        recorded = recorded.first(-(-prompts // live.batch))
    step_s = recorded.by_batch(played.step_s)
    batches = len(step_s)
    if options.assist is None:
        each_s = costs.block_host_s(name, load_s)
        step_s = step_s + each_s * blocks / steps
        # A busy machine's calibration may have found less than nothing for a block.
        step_s = np.maximum(step_s, costs.per_predictor_s[name])
    else:
        step_s = recorded.by_batch(costs.assisted_s(options, played.absent))
    if not live.decides_on_device(options):
        step_s = step_s + subject.policies_s(options, played, prompts)
    # Other prompts of the same kind, as many as were recorded.
    spread = float(np.std(step_s, ddof=1)) if batches > 1 else 0.0
    error = np.hypot(spread * np.sqrt(2 / batches), costs.noise * step_s.mean())
    tpot_s = within(float(step_s.mean()), MOST_LIKELY * float(error))
    slots = layer_slots(options, live)
    hits = played.counters.hits / (played.counters.hits + played.counters.misses)
    held = live.needs(options).other_bytes + len(slots) * live.block_bytes
    copied, mapped = on_host(options, live)
    return Estimate(
        tpot_s=tpot_s,
        ttft_s=first_token(subject, options, load_s),
        tokens_per_s=tuple(live.batch / s for s in reversed(tpot_s)),
        device_bytes=exactly(held),
        host_bytes=exactly(copied),
        mapped_bytes=exactly(mapped),
        hit_ratio=around(hits, MOST_LIKELY * hit_error(hits, batches), most=1.0),
        ppl_ratio=candidate.ppl_ratio,
        agreement=candidate.agreement,
    )


def within(middle: float, error: float) -> Range:
    """Of a time: as many times shorter as it may be longer."""
    high = middle + error
    return middle * middle / max(high, 1e-12), middle, high


def around(middle: float, error: float, most: float = float("inf")) -> Range:
    return max(0.0, middle - error), middle, min(most, middle + error)


def hit_error(hits: float, batches: int) -> float:
    """Standard error of a hit ratio: misses of one prompt differ by about 5 to 12 %."""
    return 0.12 * (1 - hits) * float(np.sqrt(2 / batches))


def first_token(subject: Subject, options, load_s: float) -> Range | None:
    """Seconds to the first token: measured with the experts here, and the blocks that
    the prompt lacks. At least those of its distinct experts that no slot holds; at
    most all of them."""
    by_tokens: Mapping[str, Mapping[str, float]] = subject.costs.prefill_s
    live = subject.live
    here_s = next(iter(by_tokens.values()))[str(live.batch)]
    points: Sequence = subject.costs.prefill_block_s
    if not points:
        return None
    slots = layer_slots(options, live)
    least = subject.recorded.prompt_blocks(slots)
    most = subject.recorded.prompt_blocks(())
    block_s = between(points, load_s)
    noise = MOST_LIKELY * subject.costs.noise * here_s
    middle = here_s + least * block_s
    return max(0.0, middle - noise), middle, here_s + most * block_s + noise
