"""`device_memory auto`: the options of an engine, chosen by a short plan.

Where the budget holds all experts, or on a GPU, there is nothing to choose. Else this
machine is measured for some tens of seconds; who wants to wait once makes a plan and
runs its `plan.gin`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.progress import say
from moe_edge.engine.auto_memory import AUTO, auto_memory
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import collect_prompts, row_tokens
from moe_edge.engine.run_generate import run_generate as plain_generate
from moe_edge.offload.slot_plan import parse_budget
from moe_edge.planner.candidates import changed
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
    live = Described(
        reader.config, reader.dtype, asked.batch, asked.tokens, None, None, None, reader
    )
    blocks = len(reader.config.moe_layers) * reader.config.moe.num_experts
    held = live.needs(options).other_bytes + blocks * live.block_bytes
    return held <= (parse_budget(budget).bytes or 0)


def with_auto(run: Callable[..., dict], read: Callable[[Mapping], dict]) -> Callable:
    """A root that plans where its `device_memory` is `auto`.

    Args:
      run: the root, which takes `checkpoint`, `device_memory` and `offload`.
      read: gives fields of `PlanOptions` by the arguments of the root.
    """

    @functools.wraps(run)
    def call(**given: Any) -> dict:
        if given.get("device_memory") == AUTO:
            given = given | _planned(run, read, given)
        return run(**given)

    call.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
    del call.__wrapped__  # gin would read the signature of that
    return call


def _planned(run, read, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(run).parameters
    defaults = {n: p.default for n, p in parameters.items()}
    given = defaults | dict(given)
    offload = given["offload"] or OffloadOptions()
    asked = read(given)
    budget = auto_memory(open_checkpoint(given["checkpoint"]))
    options = dataclasses.replace(offload, device_memory=budget)
    if not given.get("dry_run") and given.get("devices") in (None, 1):
        fixed = {n: v for n, v in changed(offload).items() if n != "device_memory"}
        options = chosen_options(given["checkpoint"], budget, fixed, **asked)
    return {"device_memory": None, "offload": options}


def _of_generate(given: Mapping[str, Any]) -> dict[str, Any]:
    texts = collect_prompts(given["prompt"], given["prompts"])
    new = max(3, given["max_new_tokens"])
    row = given["checkpoint"], texts, new, given["max_context"]
    tokens = row_tokens(*row)
    return {
        "batch": min(given["batch_size"], len(texts)),
        "prompt_tokens": max(1, min(128, tokens - new)),
        "new_tokens": new,
        "context": tokens,
        "temperature": given["temperature"],
    }


run_generate = with_auto(plain_generate, _of_generate)
