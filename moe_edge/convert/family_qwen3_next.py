"""Qwen3-Next, and Qwen3.5 and 3.6 with experts: delta-nets in three layers of four.

Defaults and the meaning of every field are those of transformers 5.24. Norms multiply
by 1 + weight, but for the delta-net's own. Full layers rotate a quarter of each head,
and gate what attention gives. A folder of Qwen3.5 also sees images: its text model is
read.
"""

from moe_edge.convert.family import ExpertNames, Family, mlp_names
from moe_edge.convert.family_layers import listed_layers, read_dense_layers, state_kinds
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields
from moe_edge.model.state_config import DeltaConfig

_FULL, _LINEAR = "full_attention", "linear_attention"
# Positions of images have three axes; those of text are alike in all, so that how
# frequencies are shared out among them changes nothing.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def qwen3_next(fields: Fields) -> dict:
    dense = read_dense_layers(fields, 5632)
    return dense | _hybrid(fields, grouped=True, top_k=10)


def qwen3_5_moe(fields: Fields) -> dict:
    name = "rope_parameters"
    if isinstance(fields.raw.get(name), dict):
        rope = fields.raw[name].items()
        text = {key: value for key, value in rope if key not in _OF_IMAGES}
        fields.raw = fields.raw | {name: text}
    fields.only("mamba_ssm_dtype", ("float32", None), "states are float32")
    fields.only("output_gate_type", ("swish", "silu", None), "the delta-net's norm")
    fields.get("intermediate_size")  # of dense layers, which there are none of
    return _hybrid(fields, grouped=False, top_k=8)


def _hybrid(fields: Fields, *, grouped: bool, top_k: int) -> dict:
    fields.only("attn_output_gate", (True, None), "attention is gated in this family")
    fields.only("attention_bias", (False,), "gated attention has no biases here")
    interval = fields.int("full_attention_interval", 4)
    types = listed_layers(
        fields,
        "layer_types",
        (_FULL, _LINEAR),
        lambda i: _LINEAR if (i + 1) % interval else _FULL,
    )
    attention = read_gqa(
        fields, kv_heads=2, head_dim=256, rotated=0.25, qk_norm="head", output_gate=True
    )
    delta = DeltaConfig(
        key_heads=fields.int("linear_num_key_heads", 16),
        value_heads=fields.int("linear_num_value_heads", 32),
        key_dim=fields.int("linear_key_head_dim", 128),
        value_dim=fields.int("linear_value_head_dim", 128),
        kernel=fields.int("linear_conv_kernel_dim", 4, low=2),
        grouped=grouped,
    )
    moe = read_moe(
        fields,
        top_k=top_k,
        width=512,
        norm=True,
        shared_dim=fields.int("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    linear = [each == _LINEAR for each in types]
    kinds = state_kinds(fields, attention, delta, linear)
    return kinds | {"moe": moe, "norm_plus_one": True}


_DELTA = {
    "conv": "conv1d.weight",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "norm": "norm.weight",
    "out_proj": "out_proj.weight",
    **{f"in_{x}": f"in_proj_{x}.weight" for x in ("qkvz", "ba", "qkv", "z", "b", "a")},
}
_TENSORS = {
    **mlp_names("shared", "mlp.shared_expert."),
    **mlp_names("attn", "linear_attn.", _DELTA),
}
QWEN3_NEXT = Family(
    read=qwen3_next,
    experts=ExpertNames(("num_experts",)),
    max_positions=32_768,
    norm_eps=1e-6,
    tensors=_TENSORS,
)
QWEN3_5_MOE_TEXT = Family(
    read=qwen3_5_moe,
    experts=ExpertNames(("num_experts",)),
    max_positions=32_768,
    norm_eps=1e-6,
    tensors=_TENSORS,
    whole="qwen3_5_moe",
    text_names={"model.language_model.": "model."},
    left_out=("model.visual.",),
)
