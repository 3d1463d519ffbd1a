"""Config of dots.llm1: DeepSeek-V3's choice of experts, norms of q and k per head.

Defaults and the meaning of every field are those of transformers 5.24.
"""

from moe_edge.convert.family import DEEPSEEK_EXPERTS, Family
from moe_edge.convert.family_layers import (
    read_first_dense,
    read_layer_types,
    read_windows,
)
from moe_edge.convert.family_parts import read_gqa, read_moe_v3
from moe_edge.convert.hf_config import REQUIRED, Fields


def dots1(fields: Fields) -> dict:
    window = fields.get("sliding_window", 4096)
    first = fields.int("max_window_layers", 62, low=0)
    types = read_layer_types(fields, lambda i: window is not None and i >= first)
    # Published files call the rule of DeepSeek-V3 by the name of its bias.
    fields.only("scoring_func", ("sigmoid", "noaux_tc", None), "the family's only one")
    attention = read_gqa(
        fields,
        kv_heads=32,
        bias=False,
        qk_norm="head",
        windows=read_windows(types, window),
    )
    moe = read_moe_v3(fields, top_k=REQUIRED, width=1408, shared=REQUIRED, norm=False)
    return read_first_dense(fields, 0) | {"attention": attention, "moe": moe}


DOTS1 = Family(read=dots1, experts=DEEPSEEK_EXPERTS, max_positions=2048, norm_eps=1e-6)
