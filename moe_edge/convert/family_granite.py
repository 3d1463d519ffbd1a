"""Granite-MoE, with and without a shared expert: multipliers, and experts in halves.

Defaults and meaning of the fields are those of transformers 5.24. The softmax of
attention is scaled by `attention_multiplier` alone, the head's width has no part in it.
"""

import dataclasses

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields


def granitemoe(fields: Fields, **parts) -> dict:
    return {
        "attention": read_gqa(
            fields, bias=False, softmax_scale=fields.float("attention_multiplier", 1.0)
        ),
        "moe": read_moe(fields, top_k=2, width=11_008, scoring="softmax_topk", **parts),
        "embed_scale": fields.float("embedding_multiplier", 1.0),
        "residual_scale": fields.float("residual_multiplier", 1.0),
        "logit_divisor": fields.float("logits_scaling", 1.0),
    }


def granitemoeshared(fields: Fields) -> dict:
    shared_dim = fields.int("shared_intermediate_size", 0, low=0)
    return granitemoe(fields, shared_dim=shared_dim)


GRANITEMOE = Family(
    read=granitemoe,
    experts=ExpertNames(("num_local_experts",), width=("intermediate_size",)),
    max_positions=2048,
    norm_eps=1e-6,
    bos=1,
    eos=2,
    tensors={
        "router.weight": "block_sparse_moe.router.layer.weight",
        "shared.gate": "shared_mlp.input_linear.weight",
        "shared.up": "shared_mlp.input_linear.weight",
        "shared.down": "shared_mlp.output_linear.weight",
    },
    expert_module="block_sparse_moe.",
    fused="halves",
    fused_tensors=("input_linear.weight", "output_linear.weight"),
    renamed={
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    },
)
GRANITEMOESHARED = dataclasses.replace(GRANITEMOE, read=granitemoeshared)
