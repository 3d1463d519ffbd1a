"""Config of Hunyuan-A13B: softmax routing, q and k normed after they are rotated.

Defaults and the meaning of every field are those of transformers 5.24; published files
have fields of the authors' own modeling code besides, which say what the model is.
"""

from moe_edge.convert.family import ExpertNames, Family, mlp_names
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields

# Fields of published files with the only values that transformers' model has, and why.
_ONLY = {
    "use_cla": ((False, None), "no layer takes another's keys"),
    "use_mla": ((False, None), "attention has grouped queries"),
    "use_mixed_mlp_moe": ((True, None), "every layer has a shared expert"),
    "num_shared_expert": ((1, None), "one shared expert, as wide as a routed one"),
    "moe_layer_num_skipped": ((0, None), "every layer has experts"),
    "moe_drop_tokens": ((False, None), "no token is dropped"),
    "moe_random_routing_dropped_token": ((False, None), "no token is dropped"),
    "group_limited_greedy": ((False, None), "experts are chosen from all"),
    "n_group": ((False, 1, None), "experts are chosen from all"),
    "topk_group": ((False, 1, None), "experts are chosen from all"),
    "routed_scaling_factor": ((False, 1, None), "the weights sum to one"),
    "use_rotary_pos_emb": ((True, None), "q and k are rotated"),
    "position_embedding_xdrope": ((False, None), "positions are one number"),
    "norm_type": (("rms", None), "norms are RMSNorm"),
    "add_classification_head": ((False, None), "it is a language model"),
}
# Tokens, and parts of models for pictures that are built on this one.
_UNREAD = """
    anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views
    cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id
    im_start_id image_token_id mask_init_id num_media_embeds org_vocab_size pad_id
    pool_type skip_cls_token text_end_id text_start_id video_end_id video_start_id
    vit_add_patchemb_bias vit_input_resolution vit_mapping_type vit_norm_type vit_patch
    vit_path vit_remove_prenorm vit_token vit_type vit_used_rms_norm
""".split()
_LISTS = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def hunyuan_v1_moe(fields: Fields) -> dict:
    """Routed experts and the shared one are all `intermediate_size` wide."""
    for name in _LISTS:
        fields.one_of_layers(name)
    for name, (allowed, reason) in _ONLY.items():
        fields.only(name, allowed, reason)
    for name in _UNREAD:
        fields.get(name)
    attention = read_gqa(
        fields, stretched=True, bias=False, qk_norm="head", qk_norm_after_rope=True
    )
    fields.only("attention_head_dim", (attention.head_dim, None), "that is head_dim")
    width = fields.int("intermediate_size", 11_008)
    moe = read_moe(fields, top_k=1, width=11_008, norm_topk=True, shared_dim=width)
    return {"attention": attention, "moe": moe}


HUNYUAN_V1_MOE = Family(
    read=hunyuan_v1_moe,
    experts=ExpertNames(
        ("num_experts", "num_local_experts"),
        ("moe_topk", "num_experts_per_tok"),
        ("intermediate_size",),
    ),
    max_positions=2048,
    norm_eps=1e-5,
    bos=1,
    eos=2,
    tensors={
        "attn.q_norm": "self_attn.query_layernorm.weight",
        "attn.k_norm": "self_attn.key_layernorm.weight",
        "router.weight": "mlp.gate.wg.weight",
        **mlp_names("shared", "mlp.shared_mlp."),
    },
    exported=False,  # its config has one width for sub-experts and the shared expert
)
