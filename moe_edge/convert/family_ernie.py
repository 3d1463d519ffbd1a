"""Config of ERNIE-4.5 (text): softmax routing with a bias for the choice.

Defaults and the meaning of every field are those of transformers 5.24. The weights of
the chosen experts are divided by max(sum, moe_norm_min); ours add 1e-20 to the sum,
which differs only where the chosen experts share less than 1e-12 of the softmax.
"""

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields


def ernie4_5_moe(fields: Fields) -> dict:
    """Layer i is MoE if (i + 1) % interval == 0 and start <= i <= end."""
    fields.only("moe_norm_min", (1e-12, None), "the smallest sum of weights")
    fields.only("moe_gate", ("topk", None), "the best experts are chosen")
    fields.only("moe_gate_act", ("softmax", None), "the router's scores")
    fields.only("use_rmsnorm", (True, None), "norms are RMSNorm")
    fields.only("moe_use_aux_free", (True, None), "the choice has a bias")
    # How many tokens an expert takes in training: none is dropped at inference.
    fields.get("moe_capacity")
    fields.int("num_nextn_predict_layers", 1, low=0, null=0)
    step = fields.int("moe_layer_interval", 1)
    first = fields.int("moe_layer_start_index", 1, low=0)
    last = fields.int("moe_layer_end_index", -1, low=-1, null=-1)
    last = fields.layers - 1 if last == -1 else last
    moe = read_moe(
        fields, top_k=6, width=1536, shared=2, norm_topk=True, correction_bias=True
    )
    return {
        "dense_layers": tuple(
            i for i in range(fields.layers) if (i + 1) % step or not first <= i <= last
        ),
        "dense_dim": fields.int("intermediate_size", 12_288),
        "attention": read_gqa(fields, kv_heads=4, theta=5e5, interleaved=True),
        "moe": moe,
    }


ERNIE4_5_MOE = Family(
    read=ernie4_5_moe,
    experts=ExpertNames(
        ("moe_num_experts", "num_experts"),
        ("moe_k", "num_experts_per_tok"),
        shared=("moe_num_shared_experts",),
    ),
    max_positions=131_072,
    norm_eps=1e-5,
    tied=True,
    bos=1,
    eos=2,
    tensors={"router.correction_bias": "mlp.moe_statics.e_score_correction_bias"},
    one_row=frozenset({"router.correction_bias"}),
    renamed={"mlp.gate.moe_statics.": "mlp.moe_statics."},
)
