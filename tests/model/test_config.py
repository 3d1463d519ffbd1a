import dataclasses

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import RopeConfig
from moe_edge.model.record import RecordLayout
from tests.support.tiny_models import GPT_OSS, GQA, MIXED

PLAIN = dataclasses.replace(GQA.attention, windows=())


def change(part=None, **fields):
    if part is None:
        return dataclasses.replace(GQA, **fields)
    inner = dataclasses.replace(getattr(GQA, part), **fields)
    return dataclasses.replace(GQA, **{part: inner})


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (None, {"d_model": 0}, "d_model must be a positive whole number, got 0"),
        (
            None,
            {"num_layers": 2.0},
            "num_layers must be a .* whole number, got 2.0",
        ),
        (
            None,
            {"activation": "relu"},
            "unknown activation 'relu'; did you mean 'gelu'. known: clamped",
        ),
        (None, {"dense_layers": (7,)}, "dense layers .7,. must lie in 0..2"),
        (None, {"dense_dim": 0}, "need dense_dim"),
        (
            "attention",
            {"rope": RopeConfig(dim=8, kind="longrope", factors=(1.0,) * 3)},
            "'longrope' that rotates 8 dimensions has 3 factors; longrope needs one",
        ),
        (None, {"norm": "batch"}, "unknown norm 'batch'.*known: layer, rms"),
        (None, {"norm_before": False}, "needs norms before or after .*, got neither"),
        ("moe", {"top_k": 13}, "top_k must be in 1..num_experts=12, got 13"),
        ("moe", {"num_groups": 5}, "num_groups 5 must divide num_experts 12"),
        ("moe", {"num_groups": 6}, "top_k 3 exceeds the 1 chosen groups of 2"),
        ("moe", {"scoring": "tanh"}, "unknown router scoring 'tanh'"),
        ("attention", {"num_kv_heads": 4}, "num_heads 6 must be a multiple"),
        ("attention", {"qk_norm_after_rope": True}, "one per head, got qk_norm 'none'"),
        ("attention", {"windows": (1, 2)}, "name 2 layers, the model has 3"),
        ("attention", {"head_dim": 6}, "rotary width 8 must be even and at most"),
        ("moe", {"input_scaled": True}, "compute one a token.* got top_k 3; use 1"),
        (None, {"layer_scale": True}, "with experts, got dense layers .0,."),
        ("moe", {"own_norms": True}, "need RMSNorms on both sides"),
        (
            "moe",
            {"expert_scale": True, "sub_experts": 2, "parent_top_k": 2}
            | {"gate": "calibrated"},
            "a calibrated gate judges blocks by what the router takes.*a linear gate",
        ),
        ("attention", {"k_is_v": True, "v_head_dim": 4}, "width 8, got v_head_dim 4"),
        (
            "attention",
            {"rope": RopeConfig(dim=8, turning=2)},
            "turns 1..4 pairs, others state none; got 2 of a rope default",
        ),
        ("attention", {"kind": "mla", "v_norm": True}, "mla has no v_norm, got True"),
        ("attention", {"temperature_span": 0}, "temperature_span must be a positive"),
        (None, {"attention_kinds": (0, 0, 0)}, "where there are other_attention"),
        (
            None,
            {"other_attention": (PLAIN,), "attention_kinds": (0, 2)},
            r"2 layers and kinds .0, 2., expected 3 layers and kinds 0..1",
        ),
    ],
)
def test_config_rejects_bad_fields(part, fields, message):
    with pytest.raises(ConfigError, match=message):
        change(part, **fields)


def test_layers_of_one_kind_share_what_the_first_has():
    assert [GQA.like(layer) for layer in range(3)] == [0, 1, 1]
    assert [MIXED.like(layer) for layer in range(4)] == [0, 1, 2, 1]
    assert MIXED.ropes == (GQA.attention.rope,)  # the other kind has none
    assert MIXED.attention_of(2).value_dim == 12 and MIXED.attention.value_dim == 10


def test_moe_layers_are_those_not_dense():
    assert GQA.moe_layers == (1, 2)


def test_record_parts_are_contiguous_aligned_and_ordered():
    layout = RecordLayout.of(GPT_OSS)
    D, F = GPT_OSS.d_model, GPT_OSS.moe.expert_dim
    assert list(layout.offsets.values()) == [
        0,
        F * D,
        2 * F * D,
        3 * F * D,
        3 * F * D + F,
        3 * F * D + 2 * F,
    ]
    assert layout.num_values == 3 * F * D + 2 * F + D
    assert layout.num_values <= layout.size < layout.num_values + 32
    assert layout.size * 2 % 64 == 0
