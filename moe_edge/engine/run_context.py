"""What policies may ask of a run before it begins: its model, and counts of a trace."""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.context import Context
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.config import ModelConfig
from moe_edge.offload.slot_plan import static_hit_curves
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE, expert_counts


def context_of(options: OffloadOptions, config: ModelConfig) -> Context:
    """What this run can give to policies that ask, before weights are read.

    Raises:
      ConfigError: `profile_trace` is of another model.
    """
    context = Context(model=lambda: config, top_k=lambda: config.moe.top_k)
    if options.profile_trace is None:
        return context
    counts_LE = count_trace(options.profile_trace, config)
    moe_LE = counts_LE[list(config.moe_layers)]
    return context.also(
        profile=lambda: counts_LE, hit_curves=lambda: static_hit_curves(moe_LE)
    )


def count_trace(path: str, config: ModelConfig) -> np.ndarray:
    """int64 [L, E]: how often a recorded model's decode steps chose each expert.

    Raises:
      ConfigError: a trace of another model; RequestError, OSError: no trace.
    """
    trace = read_trace(path)
    L, E = config.num_layers, config.moe.num_experts
    if trace.num_experts != E or trace.num_layers > L:
        raise ConfigError(
            f"trace {path} has {trace.num_layers} layers of {trace.num_experts} "
            f"experts, the model {L} of {E}; record one of this model "
            "(moe-edge generate --trace)"
        )
    counts_LE = np.zeros((L, E), np.int64)
    counts_LE[: trace.num_layers] = expert_counts(trace, DECODE)
    return counts_LE
