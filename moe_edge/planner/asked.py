"""What the user fixed or gave: budget, options, trace; kept or refused."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.texts import sha256_of
from moe_edge.model.config import ModelConfig
from moe_edge.planner.candidates import refused_value
from moe_edge.planner.host_memory import check_beside_copies
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.quality import Refused
from moe_edge.planner.replayed import Recorded, layer_slots
from moe_edge.workload.trace_reader import read_trace


def with_budget(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset,
    auto: Callable[[], str],
) -> tuple[OffloadOptions, Sequence[str | float]]:
    """The user's options with a budget, and the budgets to try.

    Args:
      auto: gives the budget of this machine.
    """
    budgets = asked.budgets(base, fixed) or (auto(),)
    return dataclasses.replace(base, device_memory=budgets[0]), budgets


def fitting(
    base: OffloadOptions,
    budgets: Sequence[str | float],
    live: Any,
    free_bytes: int | None,
) -> tuple[OffloadOptions, Sequence[str | float], list[Refused]]:
    """The base with the largest budget that can run, that one and smaller ones, and
    why larger ones are refused.

    Args:
      budgets: the largest first; live: as of `layer_slots`.
      free_bytes: of a CPU's memory, which holds copies of the experts, too; None: of a
        GPU. The one budget of a user is not compared with it.
    Raises:
      CapacityError: no budget can run; says why the first cannot.
    """
    refused: list[Refused] = []
    errors: list[CapacityError] = []
    for number, budget in enumerate(budgets):
        options = dataclasses.replace(base, device_memory=budget)
        try:
            slots = len(layer_slots(options, live))
            if free_bytes is not None and len(budgets) > 1:
                check_beside_copies(options, live, slots, free_bytes)
        except CapacityError as error:
            refused.append(Refused.by(f"device_memory {budget}", error))
            errors.append(error)
        else:
            return options, budgets[number:], refused
    raise errors[0]


def with_timed_mode(base: OffloadOptions, backend: str) -> OffloadOptions:
    """The base in the mode that a plan times here: on a GPU `auto` may be another."""
    if base.mode != "auto" or backend == "cpu":
        return base
    return dataclasses.replace(base, mode="layered")


def check_context(asked: PlanOptions, config: ModelConfig) -> None:
    """Raises CapacityError for rows that are longer than the model's context."""
    if asked.tokens <= config.max_positions:
        return
    given = f"--context is {asked.context}"
    if asked.context is None:
        given = (
            f"--prompt_tokens {asked.prompt_tokens} and --new_tokens "
            f"{asked.new_tokens} are {asked.tokens}"
        )
    raise CapacityError(
        f"{given} tokens a row, and the model's context is {config.context_words}; "
        "give fewer"
    )


def check_fixed(base: OffloadOptions, fixed: frozenset) -> None:
    """Raises ConfigError for a fixed value of which nothing can be said."""
    for name in sorted(fixed):
        if (wrong := refused_value(name, getattr(base, name))) is not None:
            raise ConfigError(f"{wrong.what} is fixed: {wrong.reason}; {wrong.remedy}")


def given_trace(
    asked: PlanOptions, config: ModelConfig, notes: list[str]
) -> Recorded | None:
    """The user's trace; ConfigError for one of another model."""
    if asked.trace is None:
        return None
    trace = read_trace(asked.trace)
    layers = {*trace.layer.tolist()}
    shape = trace.num_experts, trace.top_k
    if shape != (config.moe.num_experts, config.moe.top_k) or layers != {
        *config.moe_layers
    }:
        raise ConfigError(
            f"trace {asked.trace} has {len(layers)} layers of {shape[0]} experts, "
            f"{shape[1]} a token; the model {len(config.moe_layers)} of "
            f"{config.moe.num_experts}, {config.moe.top_k} a token; record one of this "
            "model (moe-edge generate --trace)"
        )
    notes.append(
        f"trace {Path(asked.trace).name} (sha256 {sha256_of(asked.trace)[:12]}) does "
        f"not say its temperature, nor whether its tokens were drawn: it stands for "
        f"decoding at {asked.temperature:g}; predictors that replay cannot ask are "
        "left out"
    )
    return Recorded(trace, {})
