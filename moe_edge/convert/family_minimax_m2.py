"""Config of MiniMax-M2: sigmoid routing with a bias, part of each head rotated.

Defaults and the meaning of every field are those of transformers 5.24; published files
have fields of the authors' own modeling code besides, which say what the model is.
"""

from moe_edge.convert.family import NUMBERED, ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields


def minimax_m2(fields: Fields) -> dict:
    fields.only(
        "attn_type_list",
        ([1] * fields.layers, None),
        "1 is full attention; linear attention is another family's",
    )
    fields.only("qk_norm_type", ("per_layer", None), "norms over all heads together")
    fields.only("use_routing_bias", (True, None), "the router has a bias")
    fields.only("shared_intermediate_size", (0, None), "there is no shared expert")
    # Modules that predict later tokens: nothing here computes them.
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        fields.get(name)
    rotated = 1.0
    if fields.get("rotary_dim") is not None:
        rotated = fields.int("rotary_dim") / fields.int("head_dim", 128, null=128)
    attention = read_gqa(
        fields, kv_heads=8, head_dim=128, theta=5e6, rotated=rotated, qk_norm="full"
    )
    moe = read_moe(
        fields,
        top_k=8,
        width=1536,
        scoring="sigmoid",
        norm_topk=True,
        correction_bias=True,
    )
    return {"attention": attention, "moe": moe}


_MODULE = "block_sparse_moe."
MINIMAX_M2 = Family(
    read=minimax_m2,
    experts=ExpertNames(
        ("num_local_experts", "num_experts"), width=("intermediate_size",)
    ),
    max_positions=196_608,
    norm_eps=1e-6,
    bos=200_034,
    eos=200_020,
    tensors={
        "router.weight": _MODULE + "gate.weight",
        "router.correction_bias": _MODULE + "e_score_correction_bias",
    },
    expert_module=_MODULE + "experts.",
    expert_tensors=NUMBERED,
    # transformers 5 calls this module as that of all others.
    renamed={
        "mlp." + name: _MODULE + name
        for name in ("gate.", "experts.", "e_score_correction_bias")
    },
)
