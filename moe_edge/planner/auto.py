"""`device_memory auto`: the options of an engine, chosen by a short plan.

Where the budget holds all experts, or on a GPU, there is nothing to choose. Else this
machine is measured for some tens of seconds; who wants to wait once makes a plan and
runs its `plan.gin`.
"""

from collections.abc import Mapping
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.progress import say
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.budget import parse_budget
from moe_edge.planner.options import PlanOptions

CALIBRATE_S, SEARCH_S = 30.0, 20.0


def chosen_options(
    checkpoint: str, budget: str, fixed: Mapping[str, Any], **asked: Any
) -> OffloadOptions:
    """Options of a lossless engine within a budget.

    Args:
      budget: a size.
      fixed: options that stay as they are.
      asked: fields of `PlanOptions` (batch, prompt_tokens, ...).
    """
    base = OffloadOptions(**{**fixed, "device_memory": budget})
    settings = PlanOptions(
        checkpoint=checkpoint,
        device_memory=budget,
        calibrate_s=CALIBRATE_S,
        search_s=SEARCH_S,
        max_ppl_ratio=1.0 if base.lossless else 1e9,
        **asked,
    )
    if not base.lossless or holds_all(checkpoint, budget, settings):
        return base
    import jax

    if jax.default_backend() != "cpu":  # mode fused runs there, which no plan times
        return base
    from moe_edge.planner.plan import make_plan  # loads JAX

    say(f"device_memory auto is {budget}: a plan of about a minute (moe-edge plan)")
    plan = make_plan(settings, base, frozenset({*fixed, "device_memory"}))
    say(plan.line)
    return plan.chosen


def holds_all(checkpoint: str, budget: str, asked: PlanOptions) -> bool:
    """Whether a size holds all experts beside what else is needed."""
    from moe_edge.planner.described import Described  # loads JAX

    reader = open_checkpoint(checkpoint)
    if not reader.config.moe_layers:
        return True
    options = OffloadOptions(device_memory=budget)
    config, room = reader.config.with_cache(asked.kv_cache), (asked.batch, asked.tokens)
    live = Described(config, reader.dtype, *room, None, None, None, reader)
    blocks = len(reader.config.moe_layers) * reader.config.moe.num_experts
    held = live.needs(options).other_bytes + blocks * live.block_bytes
    return held <= (parse_budget(budget).bytes or 0)
