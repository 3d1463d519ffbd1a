"""Memory of an offloaded run: live device arrays, and a process's own peak.

`python -m moe_edge.studies.speed.offload_memory CHECKPOINT MEMORY BUDGET` is the
process: it loads the checkpoint, decodes a little and prints its peak memory.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.offload.slot_plan import parse_budget
from moe_edge.studies.speed.decode import argmax, random_prompts
from moe_edge.studies.speed.models import write_random
from moe_edge.studies.speed.offload_runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    decode_run,
    load_offloaded,
)
from moe_edge.studies.speed.suite import Rows, make_row, peak_rss_bytes, run_process

CAPACITY = 64  # tokens of the KV cache that an absolute budget leaves room for
CHILD_STEPS = 8


def device_rows(name: str, folder, settings: OffloadSettings) -> Rows:
    """Live device arrays during decoding, of an absolute and a relative budget.

    The bound is the budget itself, or slots, dense weights and KV cache where the
    budget is a share of the expert bytes.
    """
    rows = []
    for budget in (settings.absolute_memory, SHARE):
        before = jax.live_arrays()  # kept alive, so that no address is used again
        old = {array.unsafe_buffer_pointer() for array in before}
        engine = load_offloaded(
            folder, device_memory=budget, batch=1, capacity=CAPACITY
        )
        samples, kv_bytes = _live_while_decoding(engine, old, settings.host_steps)
        parts = {
            "slots": engine.manager.queue.slots.num_bytes,
            "dense": engine.weights.num_bytes,
            "kv": kv_bytes,
        }
        allowed = parse_budget(budget).bytes or sum(parts.values())
        rows.append(
            make_row(
                f"{name}, live device arrays, budget {budget}",
                [max(samples) / 1e6],
                "MB",
                peer=[allowed / 1e6],
                peer_name="budget",
                bar=1.0 if parse_budget(budget).bytes else 1.01,
                samples=len(samples),
                bytes_of=parts,
            )
        )
        engine.close()
        del engine, before
    return rows


def _live_while_decoding(engine, old: set[int], steps: int) -> tuple[list[int], int]:
    """Bytes of live arrays not in `old` after each layer, and those of the cache."""
    samples: list[int] = []

    def sample(layer, routing):
        samples.append(live_bytes(old))

    prompts = random_prompts(engine, 1, PROMPT_TOKENS)
    session = engine.new_session(1, CAPACITY)
    kv_bytes = sum(array.nbytes for array in jax.tree.leaves(session.caches))
    next_B = argmax(engine.prefill(session, prompts))
    active_B = jax.device_put(next_B >= 0)
    for _ in range(min(steps, CAPACITY - prompts.shape[1])):
        next_B = argmax(engine.decode(session, next_B, active_B, sample))
        samples.append(live_bytes(old))
    return samples, kv_bytes


def live_bytes(old: set[int] = frozenset()) -> int:
    """Bytes of all live device arrays; those that share memory count once.

    Args:
      old: addresses that are left out.
    """
    sizes = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
    return sum(size for pointer, size in sizes.items() if pointer not in old)


def process_rows(work_dir: Path, settings: OffloadSettings) -> Rows:
    """Peak memory of processes that decode a large checkpoint at 25 %.

    The bound is 1.1 x checkpoint + slots (host memory on a CPU) + the bare runtime,
    which is the same process with a tiny model.
    """
    tiny = write_random(work_dir / "olmoe_tiny", tiny_config(settings.hf_config))
    bare = _child(tiny, "host", "50%")["peak_rss_bytes"]
    large = large_model(work_dir, settings)
    size = sum(path.stat().st_size for path in large.rglob("*") if path.is_file())
    rows = []
    for memory in ("host", "mmap"):
        child = _child(large, memory, SHARE)
        allowed = 1.1 * size + child["slot_bytes"] + bare
        rows.append(
            make_row(
                f"{size / 1e9:.1f} GB, {SHARE}, peak memory, {memory}",
                [child["peak_rss_bytes"] / 1e6],
                "MB",
                peer=[allowed / 1e6],
                peer_name="1.1 x checkpoint + slots + runtime",
                bar=1.0,
                checkpoint_bytes=size,
                bare_bytes=bare,
                **child,
            )
        )
    return rows


def tiny_config(hf_config: Mapping[str, Any]) -> dict:
    """The same architecture with almost no weights; two layers, so that a process
    compiles all programs that a large model needs."""
    return dict(hf_config) | {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }


def large_model(work_dir: Path, settings: OffloadSettings) -> Path:
    """Our format of the large random model, made where it is not there yet."""
    ours = work_dir / "olmoe_large_ours"
    if not ours.exists():
        convert_checkpoint(large_source(work_dir, settings), ours, progress=False)
    return ours


def large_source(work_dir: Path, settings: OffloadSettings) -> Path:
    """The large random model as a Hugging Face folder; suite `convert` has it too."""
    return write_random(work_dir / "olmoe_2gb", settings.large_config)


def _child(checkpoint: Path, memory: str, budget: str) -> dict:
    """Runs this file in a process of its own."""
    module = "moe_edge.studies.speed.offload_memory"
    return run_process(module, checkpoint, memory, budget)


def measure(checkpoint: str, memory: str, budget: str) -> dict:
    """Loads, prefills and decodes; `memory` and `budget` as in `OffloadOptions`.

    Returns:
      peak_rss_bytes, slot_bytes (of the device budget) and moved blocks.
    """
    engine = load_offloaded(checkpoint, device_memory=budget, memory=memory)
    run = decode_run(engine, np.ones((1, 16), np.int32), CHILD_STEPS)
    slot_bytes = engine.manager.queue.slots.num_bytes
    engine.close()
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "slot_bytes": slot_bytes,
        "used_blocks": run.used_blocks,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
