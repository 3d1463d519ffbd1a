"""K-EXAONE: norms of q and k per head, rotary in sliding layers only.

Experts are chosen as in DeepSeek-V3. Defaults and meaning of the fields are those of
transformers 5.24; published files say which layers are dense in fields of their own,
which must agree.
"""

import dataclasses

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_layers import (
    SLIDING,
    layer_kinds,
    read_layer_types,
    read_windows,
    typed_dense_layers,
)
from moe_edge.convert.family_parts import read_gqa, read_moe_v3, read_mtp
from moe_edge.convert.hf_config import Fields


def exaone_moe(fields: Fields) -> dict:
    read_mtp(fields)
    types = _layer_types(fields)
    sliding = read_gqa(fields, kv_heads=32, qk_norm="head")
    full = dataclasses.replace(sliding, rope=None)
    kinds = [sliding if each == SLIDING else full for each in types]
    windows = read_windows(types, fields.int("sliding_window", 4096))
    moe = read_moe_v3(fields, top_k=8, width=1024, shared=1, scaling=2.5)
    return {
        **layer_kinds(kinds, windows),
        "moe": moe,
        "dense_layers": _dense_layers(fields),
        "dense_dim": fields.int("intermediate_size", 16_384),
    }


def _layer_types(fields: Fields) -> list[str]:
    """Those of the file, else every `sliding_window_pattern`-th layer is full."""
    pattern = "sliding_window_pattern"
    fields.get(pattern)  # nothing reads it where the file has types
    return read_layer_types(fields, lambda i: (i + 1) % fields.int(pattern, 4))


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    first = fields.int("first_k_dense_replace", 1, low=0)
    dense = typed_dense_layers(fields, range(first))
    stated = [i not in dense for i in range(fields.layers)]
    fields.only("is_moe_layer", (stated, None), "as mlp_layer_types says")
    count = len(dense) if dense == tuple(range(len(dense))) else None
    fields.only("first_last_k_dense_replace", (count, None), "as mlp_layer_types says")
    return dense


EXAONE_MOE = Family(
    read=exaone_moe,
    experts=ExpertNames(("num_experts",), shared=("num_shared_experts",)),
    max_positions=2048,
    norm_eps=1e-5,
    bos=1,
    eos=53,
    tensors={"router.correction_bias": "mlp.e_score_correction_bias"},
    renamed={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
)
