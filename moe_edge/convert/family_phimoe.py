"""Phi-3.5-MoE: LayerNorm, biases everywhere but in experts, SparseMixer's choice.

Defaults and meaning of the fields are those of transformers 5.24.
"""

from moe_edge.convert.family import NUMBERED, ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError


def _take_magnitudes(fields: Fields) -> None:
    """Puts the magnitude that this family states for a scaled rope, up to its original
    context, where all others have it."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(name)
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            continue
        if kind != "longrope":
            raise ConfigError(
                f"config.json of phimoe: rope type is {kind!r}, expected 'default' or "
                "'longrope'"
            )
        short, _ = (
            fields.number(f"rope {part}", rope.get(part))
            for part in ("short_mscale", "long_mscale")
        )
        kept = {k: v for k, v in rope.items() if not k.endswith("_mscale")}
        fields.raw = fields.raw | {name: kept | {"attention_factor": short}}


def phimoe(fields: Fields) -> dict:
    _take_magnitudes(fields)
    fields.get("input_jitter_noise")  # in training only
    fields.only("num_experts_per_tok", (2,), "SparseMixer chooses two experts")
    window = fields.get("sliding_window")
    if window is not None:
        window = fields.int("sliding_window")
    slides = window is not None and window < fields.positions
    noise = fields.float("router_jitter_noise", 0.01, positive=False)
    return {
        "attention": read_gqa(
            fields,
            kv_heads=8,
            theta=1e6,
            bias=False,
            windows=(window,) * fields.layers if slides else (),
        ),
        "moe": read_moe(
            fields, top_k=2, width=6400, scoring="sparsemixer", nearness=noise
        ),
        "norm": "layer",
        "head_bias": fields.bool("lm_head_bias", False),
    }


PHIMOE = Family(
    read=phimoe,
    experts=ExpertNames(("num_local_experts",), width=("intermediate_size",)),
    max_positions=131_072,
    norm_eps=1e-5,
    bos=1,
    eos=2,
    tensors={"router.weight": "block_sparse_moe.gate.weight"},
    expert_module="block_sparse_moe.experts.",
    expert_tensors=NUMBERED,
    renamed={
        "mlp.router.": "block_sparse_moe.gate.",
        "mlp.experts.": "block_sparse_moe.experts.",
    },
    exported=False,  # transformers chooses two experts, not sub-experts
)
