"""Our side of the benchmark: timed decode and prefill of a resident engine."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.resident import ResidentEngine


def decode(engine: ResidentEngine, prompts, steps: int) -> float:
    """Greedy tokens per second of `steps` steps after the (untimed) prompts.

    Args:
      engine: loaded model.
      prompts: int array [B, S].
      steps: decode steps; the host reads every token, as a user does.
    """
    seconds = greedy_steps(engine, prompts, steps)
    return steps * len(prompts) / seconds


def greedy_steps(engine, prompts, steps: int, on_routing=None) -> float:
    """Runs decode steps after the prompts; returns the seconds of the steps."""
    B, S = np.shape(prompts)
    session = engine.new_session(B, S + steps + 1)
    tokens = argmax(engine.prefill(session, prompts))
    active = jax.device_put(np.ones(B, bool))
    np.asarray(tokens)
    started = time.perf_counter()
    for _ in range(steps):
        tokens = argmax(engine.decode(session, tokens, active, on_routing))
        np.asarray(tokens)
    return time.perf_counter() - started


def prefill(engine: ResidentEngine, prompts) -> float:
    """Prompt tokens per second up to the logits after the last token."""
    session = engine.new_session(*np.shape(prompts))
    started = time.perf_counter()
    np.asarray(argmax(engine.prefill(session, prompts)))
    return np.size(prompts) / (time.perf_counter() - started)


@jax.jit
def argmax(logits_BV):
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def bytes_per_step(engine: ResidentEngine, prompts, steps: int) -> float:
    """Mean stored bytes of weights that a decode step has to read.

    All dense weights but the embedding table (a step reads B of its rows, unless it
    is the head too), and each *distinct* expert of a step once; counted in an
    untimed run. Cache reads are not included.
    """
    weights, config = engine.weights, engine.config
    dense = sum(array.nbytes for array in jax.tree.leaves(weights.layers))
    head = weights.top["embed" if config.tie_embeddings else "head"].nbytes
    record = next(e for e in weights.experts if e is not None)
    distinct = []

    def count(layer, routing):
        distinct.append(len(np.unique(np.asarray(routing.ids_TK))))

    greedy_steps(engine, prompts, steps, count)
    experts = sum(distinct) / steps * record.nbytes / config.moe.num_experts
    return dense + head + experts
