"""Memory of an offloaded run: live device arrays, and a process's own peak."""

from pathlib import Path

import jax
import numpy as np

from moe_edge.bench.speed import Rows, make_row
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.core.process import alone, peak_rss_bytes
from moe_edge.engine.session import cache_bytes
from moe_edge.offload.budget import parse_budget
from moe_edge.studies.speed.models import write_random
from moe_edge.studies.speed.runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    decode_run,
    load_offloaded,
    random_prompts,
)

CAPACITY = 64  # tokens of the KV cache that an absolute budget leaves room for
CHILD_STEPS = 8
# Almost no weights; two layers, so that a process compiles all that a large one needs.
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def device_rows(name: str, folder, settings: OffloadSettings) -> Rows:
    """Live device arrays during decoding, of an absolute and a relative budget.

    The bound is the budget itself, or slots, dense weights and KV cache where the
    budget is a share of the expert bytes.
    """
    rows = []
    for budget in (settings.absolute_memory, SHARE):
        before = jax.live_arrays()  # kept alive, so that no address is used again
        old = {array.unsafe_buffer_pointer() for array in before}
        engine = load_offloaded(folder, device_memory=budget, capacity=CAPACITY)
        samples: list[int] = []

        def sample(layer, routing, samples=samples, old=old):
            samples.append(live_bytes(old))

        prompts = random_prompts(engine, 1, PROMPT_TOKENS)
        steps = min(settings.host_steps, CAPACITY - PROMPT_TOKENS - 1)
        decode_run(engine, prompts, steps, cold=False, on_routing=sample)
        parts = {
            "slots": engine.queue.slots.num_bytes,
            "dense": engine.weights.num_bytes,
            "kv": cache_bytes(engine.config, 1, CAPACITY),
        }
        absolute = parse_budget(budget).bytes
        rows.append(
            make_row(
                f"{name}, live device arrays, budget {budget}",
                [max(samples) / 1e6],
                "MB",
                peer=[(absolute or sum(parts.values())) / 1e6],
                peer_name="budget",
                bar=1.0 if absolute else 1.01,
                samples=len(samples),
                bytes_of=parts,
            )
        )
        engine.close()
        del engine, before
    return rows


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
    tiny = write_random(work_dir / "olmoe_tiny", dict(settings.hf_config) | TINY)
    bare = alone(measure, tiny, "host", "50%")["peak_rss_bytes"]
    large = large_ours(work_dir, settings)
    size = sum(path.stat().st_size for path in large.rglob("*") if path.is_file())
    rows = []
    for memory in ("host", "mmap"):
        child = alone(measure, large, memory, SHARE)
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


def large_source(work_dir: Path, settings: OffloadSettings) -> Path:
    """The large random model as a Hugging Face folder; suite `convert` has it too."""
    return write_random(work_dir / "olmoe_2gb", settings.large_config)


def large_ours(work_dir: Path, settings: OffloadSettings) -> Path:
    """The same in our format."""
    folder = work_dir / "olmoe_large_ours"
    if not folder.exists():
        convert_checkpoint(large_source(work_dir, settings), folder, progress=False)
    return folder


def measure(checkpoint: Path, memory: str, budget: str) -> dict:
    """Loads, prefills and decodes; `memory` and `budget` as in `OffloadOptions`.

    Returns:
      peak_rss_bytes, slot_bytes (of the device budget) and moved blocks.
    """
    engine = load_offloaded(checkpoint, device_memory=budget, memory=memory)
    run = decode_run(engine, np.ones((1, 16), np.int32), CHILD_STEPS)
    slot_bytes = engine.queue.slots.num_bytes
    engine.close()
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "slot_bytes": slot_bytes,
        "used_blocks": run.used_blocks,
    }
