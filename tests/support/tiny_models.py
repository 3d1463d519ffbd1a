"""Tiny random models in memory, with pairwise different sizes."""

import dataclasses

import ml_dtypes
import numpy as np

from moe_edge.checkpoint.schema import TOP_ITEMS, dense_items, item_shapes
from moe_edge.convert.requantise import is_encoded
from moe_edge.engine.weights import load_weights
from moe_edge.model.config import AttentionConfig, ModelConfig, MoeConfig, RopeConfig
from moe_edge.model.quantised import EIGHT, Matrix, format_of, is_interleaved
from moe_edge.model.quantising import encode
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import layer_shapes
from moe_edge.model.state_config import ConvConfig, DeltaConfig

GQA = ModelConfig(
    model_type="qwen2_moe",
    vocab_size=61,
    d_model=40,
    num_layers=3,
    attention=AttentionConfig(
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        rope=RopeConfig(dim=8),
        qkv_bias=True,
        windows=(None, 9, None),
    ),
    moe=MoeConfig(
        num_experts=12, top_k=3, expert_dim=16, shared_dim=24, shared_gate=True
    ),
    max_positions=2048,
    dense_layers=(0,),
    dense_dim=28,
)
MLA = dataclasses.replace(
    GQA,
    model_type="deepseek_v2",
    attention=AttentionConfig(
        kind="mla",
        num_heads=5,
        num_kv_heads=5,
        head_dim=14,
        nope_dim=8,
        v_head_dim=6,
        kv_lora_rank=10,
        q_lora_rank=18,
        rope=RopeConfig(dim=6, interleaved=True),
    ),
)
GPT_OSS = dataclasses.replace(
    GQA,
    model_type="gpt_oss",
    attention=dataclasses.replace(GQA.attention, sinks=True, out_bias=True),
    moe=MoeConfig(
        num_experts=12,
        top_k=3,
        expert_dim=16,
        scoring="softmax_topk",
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        swiglu_limit=2.0,
    ),
)
# Without a dense layer: for tests that would compile its programs for nothing.
MOE_ONLY = dataclasses.replace(
    GQA,
    num_layers=2,
    dense_layers=(),
    attention=dataclasses.replace(GQA.attention, windows=(None, 9)),
)
# The two ways in which layers differ most from GQA's, in one model.
MLA_BIAS = dataclasses.replace(MLA, moe=GPT_OSS.moe)
# Two kinds of attention, which share neither widths, heads, rope nor sinks; both kinds
# have a layer with experts.
MIXED = dataclasses.replace(
    GQA,
    num_layers=4,
    attention=dataclasses.replace(
        GQA.attention, v_head_dim=10, sinks=True, windows=(9, 9, None, 9)
    ),
    other_attention=(
        AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=12, rope=None, softmax_scale=0.4
        ),
    ),
    attention_kinds=(0, 0, 1, 0),
)
# LayerNorm on both sides of every branch, multipliers, SparseMixer, a head with a bias.
PARTS = dataclasses.replace(
    GQA,
    norm="layer",
    norm_after=True,
    embed_scale=1.3,
    residual_scale=0.7,
    logit_divisor=1.7,
    head_bias=True,
    moe=dataclasses.replace(GQA.moe, scoring="sparsemixer", nearness=0.3),
)
# Layers with states of both kinds, one of them dense, and one with attention.
STATES = dataclasses.replace(
    GQA,
    num_layers=4,
    attention=dataclasses.replace(
        GQA.attention, qkv_bias=False, windows=(), qk_norm="head", output_gate=True
    ),
    other_attention=(
        ConvConfig(dim=40, kernel=3),
        DeltaConfig(key_heads=2, value_heads=4, key_dim=20, value_dim=14, kernel=4),
    ),
    attention_kinds=(1, 2, 0, 2),
    norm_plus_one=True,
)
ALL = {"gqa": GQA, "mla": MLA, "gpt_oss": GPT_OSS, "mla_bias": MLA_BIAS}
ALL["parts"] = PARTS
ALL["mixed"] = MIXED
ALL["states"] = STATES


def _quantised(config: ModelConfig, kind: str) -> ModelConfig:
    moe = dataclasses.replace(config.moe, expert_dim=32, expert_kind=kind)
    return dataclasses.replace(config, d_model=64, moe=moe)


# Whole blocks of 32; of one block a row and of two.
# Rows of two kinds stand in eights, as converted ones do; those of mxfp4 are apart.
ALL |= {"q8_0": _quantised(GQA, "q8_0x8"), "q4_0": _quantised(GPT_OSS, "q4_0x8")}
ALL["mxfp4"] = _quantised(GPT_OSS, "mxfp4")
ALL["int8"] = dataclasses.replace(ALL["q4_0"], activations="int8")


class RandomReader:
    """An open checkpoint with random weights; layers are drawn on demand.

    Dense weights of a model with quantised experts are in blocks, too.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, dtype=np.float32):
        self.config, self.seed, self._dense = config, seed, np.dtype(dtype)
        self.layout = RecordLayout.of(config)
        self.dtype = np.dtype(np.uint8) if self.layout.kind else self._dense

    def _draw(self, shapes: dict[str, tuple], *path: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, *path))
        arrays = {}
        for name, shape in shapes.items():
            if name.endswith(("norm", "layer_scale", "input_scale", "expert_scale")):
                array = 1.0 + 0.2 * rng.standard_normal(shape, np.float32)
            else:
                # Logits get a standard deviation near one, so that routing and
                # argmax are decided, not rounding.
                scale = 1.0 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
                array = scale * rng.standard_normal(shape, np.float32)
            if self._is_encoded(name, shape):
                kind = format_of(self.layout.kind)
                matrix = Matrix(kind, encode(kind, array))
                in_eights = is_interleaved(self.layout.kind)
                arrays[name] = matrix.interleaved() if in_eights else matrix
            else:
                arrays[name] = array.astype(self._dense)
        return arrays

    def _is_encoded(self, name: str, shape: tuple[int, ...]) -> bool:
        in_blocks = self.layout.kind is not None and len(shape) == 2
        return in_blocks and is_encoded(self.config, name, shape)

    @property
    def dense_kind(self) -> str | None:
        kinds = {
            k for i in dense_items(self.config) for k in self.dense_kinds(i).values()
        }
        return "+".join(sorted(kinds)) or None

    def dense_kinds(self, item) -> dict[str, str]:
        found = {}
        for name, shape in item_shapes(self.config, item).items():
            if self._is_encoded(name, shape):
                kind, apart = self.layout.kind, shape[0] % EIGHT
                found[name] = format_of(kind) if apart else kind
        return found

    def top(self):
        items = [i for i in dense_items(self.config) if i in TOP_ITEMS]
        shapes = [item_shapes(self.config, item) for item in items]
        return self._draw({k: v for part in shapes for k, v in part.items()}, 0)

    def dense_layer(self, layer):
        return self._draw(layer_shapes(self.config, layer), 1, layer)

    def experts(self, layer):
        E, R = self.config.moe.num_experts, self.layout.unquantised.size
        rng = np.random.default_rng((self.seed, 2, layer))
        scale = 1.0 / np.sqrt(self.config.d_model)
        records = scale * rng.standard_normal((E, R), np.float32)
        if self.layout.kind is not None:
            return np.stack([self.layout.encode(record_R) for record_R in records])
        return records.astype(self.dtype)

    def read_experts(self, layer, first, out_NR):
        out_NR[:] = self.experts(layer)[first : first + len(out_NR)]


def random_weights(config: ModelConfig, seed: int = 0, dtype=np.float32):
    """Weights of a random model on the device."""
    return load_weights(RandomReader(config, seed, dtype))


def random_prompts(config: ModelConfig, lengths, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, n).tolist() for n in lengths]


def score_all(engine, prompts) -> list[np.ndarray]:
    """Teacher-forced logits `[S_b, V]` of every prompt."""
    longest = max(map(len, prompts))
    out = np.zeros((len(prompts), longest, engine.config.vocab_size), np.float32)
    for start, logits in engine.score(prompts):
        keep = min(logits.shape[1], longest - start)
        out[:, start : start + keep] = np.asarray(logits)[:, :keep]
    return [out[row, : len(prompt)] for row, prompt in enumerate(prompts)]


BF16 = ml_dtypes.bfloat16
