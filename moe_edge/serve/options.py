"""Options of serving tokens, shared by the server and the load generator."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
)
from moe_edge.engine.load import WEIGHTS
from moe_edge.engine.sizes import check_context
from moe_edge.hardware.step_costs import StepCosts, read_step_costs
from moe_edge.model.attention_config import CACHE_TYPES
from moe_edge.model.config import ModelConfig
from moe_edge.model.config_checks import ROUNDINGS
from moe_edge.offload.budget import check_budget, parse_budget
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.schedule.policy import SCHEDULERS, Scheduler, get_scheduler

if TYPE_CHECKING:  # the options alone are light: a script reads its flags from them
    from moe_edge.engine.base import Engine
    from moe_edge.engine.slot_programs import SlotShapes
    from moe_edge.hosts.link import Link
    from moe_edge.serve.driver import Driver

SERVED = ("max_batch", "max_wait_s", "own_k", "costs")  # what a scheduler is given
LONGEST_CONTEXT = 4096  # unless asked for more: warm-up grows with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How requests for tokens are scheduled and run.

    Attributes:
      policy: scheduling policy, by name, class or object: which request runs next, and
        at which K; policy_options: its fields.
      max_batch: most requests that are decoded together.
      max_wait_s: how long the policy may hold a request back, to batch it.
      max_waiting: most requests in the queue; further ones are refused (429).
      max_context: most tokens of a request, prompt and answer; None: the model's
        context, at most 4,096.
      kv_memory: memory of all KV caches (`2GiB`); None: what `max_batch` requests of
        `max_context` tokens need.
      prompt_cache: memory for the KV caches of finished requests, reused where a prompt
        begins alike: a share of `kv_memory` (`25%`) or a size; `0`: none. Prefixes are
        kept in chunks of `prefill_chunk` tokens.
      prefill_chunk: most prompt tokens that run between two decode steps.
      prompt_rows: most prompts that are prefilled together; they must have one padded
        size, and together fit a chunk.
      default_min_k: fewest experts a token for requests that do not say; None: the
        model's own K.
      deterministic: the same bits for a request whichever requests run with it, at the
        K at which it runs (a policy of one K for a batch sets that K).
      activations: as of `moe-edge generate`: float32, exact, or int8, rounded.
      kv_cache: how keys and values are kept, of running rows and of the prompt cache:
        float32, exact; or bfloat16 or q8_0, in a half or about a quarter of the bytes.
      weights: copied into memory; or mapped: experts of a checkpoint of ours stay in
        its files on a CPU, and the system may take their memory back.
      costs: machine.json with `step_costs` (moe-edge profile_machine --checkpoint),
        which `qos` and `elastic` need.
    """

    policy: str | Scheduler | type[Scheduler] = "continuous"
    policy_options: Mapping[str, Any] | None = None
    max_batch: int = 8
    max_wait_s: float = 1.0
    max_waiting: int = 256
    max_context: int | None = None
    kv_memory: str | None = None
    prompt_cache: str = "25%"
    prefill_chunk: int = 512
    prompt_rows: int = 8
    default_min_k: int | None = None
    deterministic: bool = False
    activations: str = "float32"
    kv_cache: str = "float32"
    weights: str = "copied"
    costs: str | None = None

    def __post_init__(self):
        """Raises ConfigError for what no model could be served with."""
        check_known("activations", self.activations, ROUNDINGS)
        check_known("kv_cache", self.kv_cache, CACHE_TYPES)
        check_known("weights", self.weights, WEIGHTS)
        SCHEDULERS.check(self.policy, self.policy_options or {}, SERVED)
        for name in ("max_batch", "max_waiting", "prefill_chunk", "prompt_rows"):
            check_count(name, getattr(self, name))
        for name in ("max_context", "default_min_k"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_from_zero("max_wait_s", self.max_wait_s)
        if self.kv_memory is not None:
            check_budget("kv_memory", self.kv_memory, "bytes", "size such as 2GiB")
        if self.prompt_cache != "0":
            expected = "share of kv_memory (25%), a size (2GiB) or 0"
            check_budget("prompt_cache", self.prompt_cache, None, expected)
            if parse_budget(self.prompt_cache).share == 1:
                raise ConfigError("prompt_cache 100% leaves nothing for running rows")

    def check_named(self, why: str) -> None:
        """Raises ConfigError for a scheduler that has no name to write down."""
        if not isinstance(self.policy, str):
            raise ConfigError(
                f"policy is {self.policy!r:.60}, and {why}; install its class as a "
                "package (docs/plug_ins.md), or register it, and give its name"
            )

    def check_model(self, config: ModelConfig) -> None:
        """Refuses what this model cannot be served with.

        Raises:
          ConfigError: a floor above the model's K; CapacityError: too long a context.
        """
        own_k = config.moe.top_k
        if self.default_min_k is not None and self.default_min_k > own_k:
            raise ConfigError(
                f"default_min_k {self.default_min_k} exceeds the model's K of {own_k}"
            )
        check_context(self.max_context or 0, config)

    def context(self, max_positions: int) -> int:
        """Tokens of the longest row."""
        return self.max_context or min(max_positions, LONGEST_CONTEXT)

    def sizes(self, max_context: int) -> dict[str, int | bool]:
        """Of a running batch, as `engine.sizes.SlotSizes` takes them."""
        return {
            "max_rows": self.max_batch,
            "max_context": max_context,
            "prefill_chunk": self.prefill_chunk,
            "prompt_rows": min(self.prompt_rows, self.max_batch),
            "deterministic": self.deterministic,
        }

    def step_costs(self) -> StepCosts | None:
        """Read from `costs`."""
        return None if self.costs is None else read_step_costs(Path(self.costs))


class CacheBytes(NamedTuple):
    """What caches may take: of running rows, of prompts on their way, of ended rows.

    The first is what a loop budgets: in a total there is also room for a batch that
    moves (`SlotShapes.peak_bytes`).
    """

    running: int
    prompts: int
    kept: int


def cache_bytes_of(options: ServingOptions, shapes: "SlotShapes") -> CacheBytes:
    """Shares out the memory of all caches.

    Raises:
      CapacityError: too little for one row of the longest context, or for a state in
        the prompt cache.
    """
    longest, prompts = shapes.row_bytes(shapes.max_context), shapes.prompt_bytes()
    running, rows = shapes.max_rows * longest, shapes.rows[0]
    least = shapes.peak_bytes(rows * longest)
    kept = None if options.prompt_cache == "0" else parse_budget(options.prompt_cache)
    share = (kept and kept.share) or 0.0
    amount = (kept and kept.bytes) or 0
    if options.kv_memory is None:
        own = int((shapes.peak_bytes(running) + prompts) * share / (1 - share))
        shapes.check_kept(amount + own)
        return CacheBytes(running, prompts, amount + own)
    total = parse_budget(options.kv_memory).bytes
    amount += int(total * share)
    shapes.check_kept(amount)
    if (left := total - amount - prompts) < least:
        raise CapacityError(
            f"kv_memory {options.kv_memory} leaves {left} bytes for running rows, "
            f"after {prompts} for prompts on their way and {amount} for the prompt "
            f"cache; {rows} of {shapes.max_context} tokens, the fewest, take {least}: "
            "give more, or lower max_context, prompt_rows or prompt_cache"
        )
    return CacheBytes(min(shapes.bytes_within(left), running), prompts, amount)


def make_loop(
    options: ServingOptions, own_k: int, limits: Limits, costs: StepCosts | None
) -> RequestLoop:
    """The request loop that these options describe."""
    has = options.max_batch, options.max_wait_s, own_k, costs
    given = dict(zip(SERVED, has, strict=True))
    policy = get_scheduler(options.policy, options.policy_options or {}, **given)
    if not 0 < policy.max_batch <= options.max_batch:
        raise ConfigError(
            f"scheduling policy {policy.name} has max_batch {policy.max_batch}, and "
            f"{options.max_batch} rows run at a time; raise the server's max_batch, or "
            "lower the policy's to 1 or more"
        )
    return RequestLoop(policy, limits=limits)


def make_driver(
    engine: "Engine",
    options: ServingOptions,
    clock: Callable[[], float] = time.monotonic,
    fail_step: int | None = None,
    link: "Link | None" = None,
) -> "Driver":
    """A driver over an engine; `driver.slots.warm_up()` compiles what it needs.

    Args:
      link: of process 0 to others that follow its row slots (`engine/lock_step.py`).
    Raises:
      ConfigError, CapacityError: options that this engine cannot honour.
    """
    from moe_edge.engine.slot_programs import SlotShapes
    from moe_edge.engine.slots import RowSlots
    from moe_edge.serve.driver import Driver

    config = engine.config
    options.check_model(config)
    sizes = options.sizes(options.context(config.max_positions))
    sizes_bytes = cache_bytes_of(options, SlotShapes(config, **sizes))
    sizes |= {"prompt_cache_bytes": sizes_bytes.kept}
    if link is not None and not link.index:
        from moe_edge.engine.lock_step import LeadingSlots

        slots: RowSlots = LeadingSlots(engine, link, **sizes)
    else:
        slots = RowSlots(engine, **sizes)
    limits = Limits(
        max_waiting=options.max_waiting,
        kv_budget_bytes=sizes_bytes.running,
        kv_together=slots.together_bytes,
    )
    loop = make_loop(options, config.moe.top_k, limits, options.step_costs())
    return Driver(slots, loop, clock, fail_step)
