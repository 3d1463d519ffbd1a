"""The checkpoints that the benchmark runs: the default model and random ones.

A random model has the shape of OLMoE at a size that fits a small machine. Random
weights route uniformly and carry no quality claim; only their speed is measured.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.convert.rules import Piece, hf_shapes
from moe_edge.convert.safetensors_writer import SafetensorsWriter
from moe_edge.core.out_folder import atomic_folder
from moe_edge.model.quantised import DENSE_KINDS, KINDS

DTYPES = ("float32", "bfloat16")


def olmoe_config(
    layers: int, dtype: str, experts: int = 64, hidden: int = 768, heads: int = 12
) -> dict:
    """HF config of an OLMoE-shaped model; 8 layers have 0.45 B parameters."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }


def draw_pool(rng: np.random.Generator) -> np.ndarray:
    """One large draw for `random_matrix`: drawing 2 GB takes a minute, 32 GB many."""
    return rng.standard_normal(1 << 22, np.float32)


def random_matrix(rng: np.random.Generator, pool: np.ndarray, shape) -> np.ndarray:
    """float32 of standard deviation 1 / sqrt(inputs): a piece of the pool, which is
    repeated, from a random place on."""
    start, size = int(rng.integers(pool.size)), math.prod(shape)
    repeats = -(-(start + size) // pool.size)
    values = np.tile(pool, repeats)[start : start + size].reshape(shape)
    return values / np.float32(math.sqrt(shape[-1]))


def write_random(folder: Path, hf_config: dict, seed: int = 0) -> Path:
    """Writes a random HF checkpoint, unless the folder is there already.

    Matrices have a standard deviation of 1 / sqrt(inputs), norms are one: logits and
    routing stay of ordinary size.
    """
    if folder.exists():
        return folder
    config, dtype = config_from_hf(hf_config), WEIGHT_DTYPES[hf_config["dtype"]]
    shapes = hf_shapes(config)
    rng = np.random.default_rng(seed)
    pool = draw_pool(rng)
    with atomic_folder(folder) as partial:
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        writer = SafetensorsWriter(
            partial, shapes, dict.fromkeys(shapes, dtype), shard_bytes=1 << 30
        )
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                array = np.ones(shape, np.float32)
            else:
                array = random_matrix(rng, pool, shape)
            writer.write(Piece(name, 0, array.astype(dtype)))
        writer.close()
    return folder


class BenchmarkModel(NamedTuple):
    """A model that decode and prefill are timed on.

    Attributes:
      name: of the model; folder: what we run.
      hf_folder: its weights before they were quantised: what peers run.
      kind: what its experts are quantised to; None: nothing is.
      dense: what all other matrices are, by `convert --dtype`; None: as in `hf_folder`.
      activations: what single tokens are when they meet quantised weights.
    """

    name: str
    folder: Path
    hf_folder: Path
    kind: str | None = None
    dense: str | None = None
    activations: str = "float32"


def benchmark_models(work_dir: Path) -> list[BenchmarkModel]:
    """The default model, and random ones: as float32, as bfloat16, and quantised."""
    models = [BenchmarkModel("default", DEFAULT_MODEL, DEFAULT_MODEL)]
    for dtype in DTYPES:
        folder = work_dir / f"olmoe_8_layers_{dtype}"
        write_random(folder, olmoe_config(8, dtype))
        models.append(BenchmarkModel(f"olmoe_450m_{dtype}", folder, folder))
    for kind in KINDS:  # of the last of these
        # Of mxfp4 the experts alone, as files of gpt-oss have it.
        dense = kind if kind in DENSE_KINDS else None
        quantised = work_dir / f"olmoe_8_layers_{kind}{'_dense' if dense else ''}"
        if not quantised.exists():
            options = {"expert_dtype": kind, "dtype": dense, "progress": False}
            convert_checkpoint(folder, quantised, **options)
        name, given = f"olmoe_450m_{kind}", (quantised, folder, kind, dense)
        models.append(BenchmarkModel(name, *given))
        if dense is not None:
            models.append(BenchmarkModel(f"{name}_int8", *given, "int8"))
    return models
