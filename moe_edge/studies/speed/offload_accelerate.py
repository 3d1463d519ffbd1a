"""Suite `offload`'s peer: accelerate, which reads what does not fit from disk.

It keeps a quarter of the layers and moves the others whole at each step; ours keeps a
quarter of each layer's experts and moves those that were chosen. Both run in processes
of their own and read files that stay in the page cache: no disk is timed.
"""

import math
import tempfile
import time
from pathlib import Path

import numpy as np

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Rows, make_row
from moe_edge.convert.hf_reader import HfReader
from moe_edge.core.process import alone
from moe_edge.studies.speed.peers import installed
from moe_edge.studies.speed.runs import SHARE, decode_run, load_offloaded

STEPS = 4  # of decoding, after one that is not timed
WAYS = ("eager", "grouped_mm")  # how `transformers` computes experts
PROMPT = np.ones((1, 16), np.int32)


def accelerate_rows(hf_folder: Path, ours: Path, repeats: int) -> Rows:
    """Milliseconds a token at 25 % in memory and the rest on disk; no row without the
    packages.

    Args:
      hf_folder: the model; ours: the same in our format.
    """
    if not installed("accelerate", "torch", "transformers"):
        return []
    cases = {way: lambda way=way: alone(_accelerate_s, hf_folder, way) for way in WAYS}
    cases["ours"] = lambda: alone(_ours_s, ours)
    found_s = interleave(cases, repeats)
    best = min(WAYS, key=lambda way: float(np.median(found_s[way])))
    return [
        make_row(
            f"{hf_folder.name}, {SHARE} in memory, the rest in cached files",
            [MS * seconds for seconds in found_s["ours"]],
            "ms/token",
            peer=[MS * seconds for seconds in found_s[best]],
            peer_name=f"accelerate, disk offload ({best})",
            bar=1.0,
            peers={way: MS * float(np.median(found_s[way])) for way in WAYS},
        )
    ]


def layer_places(num_layers: int) -> dict[str, str]:
    """`device_map` of `transformers`: at least our share of the layers in memory."""
    kept = math.ceil(num_layers * float(SHARE.removesuffix("%")) / 100)
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(parts, "cpu") | {
        f"model.layers.{layer}": "cpu" if layer < kept else "disk"
        for layer in range(num_layers)
    }


def _ours_s(checkpoint: Path) -> float:
    """Median seconds of a step with experts mapped from disk."""
    engine = load_offloaded(checkpoint, device_memory=SHARE, memory="mmap")
    run = decode_run(engine, PROMPT, STEPS + 1, forced=True)
    engine.close()
    return float(np.median(run.step_s[1:]))


def _accelerate_s(hf_folder: Path, way: str) -> float:
    """The same of a `transformers` model, a quarter of whose layers stay in memory."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    places = layer_places(HfReader(hf_folder).config.num_layers)
    with tempfile.TemporaryDirectory() as offload_folder, torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_folder, dtype="auto", device_map=places, offload_folder=offload_folder
        ).eval()
        model.set_experts_implementation(way)
        out, step_s = model(torch.as_tensor(PROMPT), use_cache=True), []
        rng, vocabulary = np.random.default_rng(1), out.logits.shape[-1]
        for token in rng.integers(0, vocabulary, (STEPS + 1, 1, 1)):  # as ours
            cache = out.past_key_values
            started = time.perf_counter()
            out = model(torch.as_tensor(token), past_key_values=cache, use_cache=True)
            step_s.append(time.perf_counter() - started)
    return float(np.median(step_s[1:]))
