"""GGUF files of every family against the same model's Hugging Face folder."""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES
from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert.gguf_blocks import decode
from moe_edge.convert.gguf_families import ARCHITECTURES
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CheckpointError, ConfigError, MoeEdgeError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.model.quantised import Matrix
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.gguf_files import from_hf, tokenizer_metadata, write_gguf
from tests.support.slow_cases import slow, slow_but
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder
from tests.support.tiny_models import random_prompts, score_all

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# What a GGUF file cannot say is changed in the families' tiny configs.
SAYABLE = {
    "olmoe": {"rms_norm_eps": 1e-5},
    "mixtral": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "deepseek": {"rms_norm_eps": 1e-6},
    "deepseek_v2": {"rms_norm_eps": 1e-6, "rope_scaling": YARN},
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "rope_parameters": YARN,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 40,
            "truncate": False,
        },
    },
    "glm4_moe": {"rms_norm_eps": 1e-5, "norm_topk_prob": True},
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "solar_open": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e6,
    },
    "dots1": {"rms_norm_eps": 1e-6, "sliding_window": None},
    "minimax_m2": {"rms_norm_eps": 1e-6},
    "ernie4_5_moe": {"rms_norm_eps": 1e-5, "moe_layer_interval": 1},
    "hunyuan_v1_moe": {"rms_norm_eps": 1e-5, "rope_scaling": None},
    "granitemoe": {"rms_norm_eps": 1e-6},
    "granitemoeshared": {"rms_norm_eps": 1e-6},
    "phimoe": {"rms_norm_eps": 1e-5, "router_jitter_noise": 0.01},
    "mimo_v2_flash": {"rms_norm_eps": 1e-5, "norm_topk_prob": True},
    "llama4_text": {
        "rms_norm_eps": 1e-5,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_theta": 5e5,
    },
    "gemma4_text": {"rms_norm_eps": 1e-6},
    "lfm2_moe": {"norm_eps": 1e-5, "routed_scaling_factor": 1.0},
    "exaone_moe": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    "deepseek_v32": {
        "rms_norm_eps": 1e-6,
        "rope_parameters": YARN,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "glm_moe_dsa": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
# Families that llama.cpp writes as another one, of the same arithmetic.
ALIASES = {"glm4_moe_lite": "deepseek_v3", "solar_open": "glm4_moe"}
ROUNDED = ("qwen3_next", "qwen3_5_moe_text")  # a file holds what is computed of some
WIDE = {"hidden_size": 64, "intermediate_size": 32}


def model(family: str, **changes):
    raw = raw_config(family, **SAYABLE[family], **changes)
    return raw, random_tensors(raw)


def gguf(path, raw, tensors, kind="F32", extra=None, **options):
    said, written = from_hf(raw, tensors, kind, **options)
    return write_gguf(path, said | (extra or {}), written)


def comparable(config):
    """A config without ids of tokens, and without the width of layers it lacks."""
    width = config.dense_dim if config.dense_layers else 0
    return dataclasses.replace(config, bos_id=None, eos_ids=(), dense_dim=width)


def numbers(weight) -> np.ndarray:
    return weight.decode() if isinstance(weight, Matrix) else weight


def assert_same_weights(got, expected, exact_dtypes=True):
    for item in dense_items(expected.config):
        ours, theirs = got.dense(item), expected.dense(item)
        assert sorted(ours) == sorted(theirs)
        dtypes = got.dense_dtypes(item)
        ours, theirs = ({n: numbers(a) for n, a in f.items()} for f in (ours, theirs))
        for name, array in theirs.items():
            assert ours[name].dtype == dtypes[name], name
            np.testing.assert_array_equal(ours[name], array, name, strict=exact_dtypes)
    for layer in expected.config.moe_layers:
        np.testing.assert_array_equal(
            got.experts(layer), expected.experts(layer), strict=exact_dtypes
        )


@pytest.mark.parametrize("family", slow_but(["deepseek_v2", "gpt_oss"], SAYABLE))
def test_float32_file_holds_the_folders_config_and_weights(family, tmp_path):
    raw, tensors = model(family)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    file = gguf(tmp_path / "x.gguf", raw, tensors)
    expected, got = open_checkpoint(hf), open_checkpoint(file)
    meant = ALIASES.get(family, family)
    renamed = dataclasses.replace(expected.config, model_type=meant)
    assert comparable(got.config) == comparable(renamed)
    assert_same_weights(got, expected)
    first = convert(hf, tmp_path / "from_hf")
    second = convert(file, tmp_path / "from_gguf")
    assert second["content_sha256"] == first["content_sha256"]
    assert second["dropped"] == []
    convert(file, tmp_path / "folder", to="hf")
    assert_same_tensors(load_all(tmp_path / "folder"), tensors)


@pytest.mark.parametrize(
    "family",
    [
        family
        if family == "qwen2_moe"
        else pytest.param(family, marks=pytest.mark.slow)
        for family in SAYABLE
    ],
)
def test_logits_of_a_file_are_the_folders_bit_for_bit(family, tmp_path):
    raw, tensors = model(family)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    file = gguf(tmp_path / "x.gguf", raw, tensors)
    prompts = random_prompts(open_checkpoint(hf).config, (41,))
    expected, got = (
        score_all(ResidentEngine(load_weights(open_checkpoint(path))), prompts)[0]
        for path in (hf, file)
    )
    assert expected.std() > 0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ROUNDED)
def test_file_of_a_delta_net_is_its_folder_within_rounding(family, tmp_path):
    """A file holds -exp(A_log), and one more than the weights of norms."""
    raw = raw_config(family, rms_norm_eps=1e-6)
    tensors = random_tensors(raw)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    file = gguf(tmp_path / "x.gguf", raw, tensors)
    expected, got = open_checkpoint(hf), open_checkpoint(file)
    assert comparable(got.config) == comparable(expected.config)
    for item in dense_items(expected.config):
        ours, theirs = got.dense(item), expected.dense(item)
        assert sorted(ours) == sorted(theirs)
        for name, array in theirs.items():
            changed = name.endswith(("norm", "a_log"))
            np.testing.assert_allclose(
                ours[name], array, rtol=0, atol=1e-6 if changed else 0, err_msg=name
            )


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_of_before_2025_has_one_kv_b(family, tmp_path):
    raw, tensors = model(family)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    got = open_checkpoint(gguf(tmp_path / "x.gguf", raw, tensors, old=True))
    expected = open_checkpoint(hf)
    assert comparable(got.config) == comparable(expected.config)
    assert_same_weights(got, expected)


def test_every_architecture_is_tested_and_in_the_documentation():
    families = {ALIASES.get(f, f) for f in (*SAYABLE, *ROUNDED)}
    assert {a.model_type for a in ARCHITECTURES.values()} <= families
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert [name for name in ARCHITECTURES if f"`{name}`" not in text] == []


def test_joined_tensors_are_cut_into_their_parts(tmp_path):
    raw, tensors = model("qwen2_moe", hidden_size=64, moe_intermediate_size=32)
    for kind in ("F32", "Q8_0"):
        file = gguf(tmp_path / f"{kind}.gguf", raw, tensors, kind)
        joined = gguf(tmp_path / f"{kind}_j.gguf", raw, tensors, kind, joined=True)
        got, expected = open_checkpoint(joined), open_checkpoint(file)
        assert "blk.0.attn_qkv.bias" in got._file.tensors
        assert "blk.0.ffn_gate_up_exps.weight" in got._file.tensors
        assert got.layout.kind == {"Q8_0": "q8_0"}.get(kind)
        assert_same_weights(got, expected)
    wrong = {"qwen2moe.attention.head_count_kv": 1}
    with pytest.raises(CheckpointError, match="attn_qkv.weight has shape"):
        open_checkpoint(
            gguf(tmp_path / "x.gguf", raw, tensors, extra=wrong, joined=True)
        )


def test_model_in_parts_is_read_by_the_names_of_links(tmp_path):
    """As in the hub's cache, where files are named by their hash."""
    said, written = from_hf(*model("olmoe"))
    split = {"split.count": 2, "split.tensors.count": len(written)}
    names = list(written)
    for number, own in enumerate((names[:9], names[9:])):
        head = (said if number == 0 else {}) | split | {"split.no": number}
        blob = tmp_path / f"blob{number}"
        write_gguf(blob, head, {name: written[name] for name in own})
        link = tmp_path / f"x-0000{number + 1}-of-00002.gguf"
        link.symlink_to(blob)
    whole = open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))
    got = open_checkpoint(tmp_path / "x-00001-of-00002.gguf")
    assert_same_weights(got, whole)


@pytest.mark.parametrize("family", [*slow("mixtral"), "gpt_oss"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_other_types_are_what_they_decode_to(family, kind, tmp_path):
    raw, tensors = model(family, **(WIDE if family == "mixtral" else {}))
    if family == "gpt_oss":  # as in its files: biases that bfloat16 holds
        for name in tensors:
            if name.endswith("_bias"):
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16).astype("f4")
    file = gguf(tmp_path / "x.gguf", raw, tensors, kind)
    # Without a dtype blocks would be kept (test_gguf_blocks_kept.py).
    asked = "float32" if kind in ("Q8_0", "Q4_0", "MXFP4") else None
    got = open_checkpoint(file, asked and WEIGHT_DTYPES[asked])
    wide = {n: t.astype(np.float32) for n, t in _decoded(raw, tensors, kind).items()}
    expected = open_checkpoint(write_folder(tmp_path / "hf", raw, wide))
    narrow = {"F16": "float16", "BF16": "bfloat16"}
    if kind == "F16" and family == "gpt_oss":  # a bias beyond float16's digits
        narrow["F16"] = str(got.dtype)
    assert got.dtype.name == narrow.get(kind, "float32")
    quantised = {"Q8_0": "q8_0", "Q4_0": "q4_0", "MXFP4": "mxfp4"}.get(kind)
    assert got.quantized == quantised
    assert_same_weights(got, expected, exact_dtypes=False)
    convert(file, tmp_path / "ours", dtype=asked)
    ours = open_checkpoint(tmp_path / "ours")
    assert ours.dtype == got.dtype
    assert ours.config.hf_config["dtype"] == got.dtype.name
    assert_same_weights(ours, got)
    cast = open_checkpoint(file, np.dtype(ml_dtypes.bfloat16))
    for item in dense_items(cast.config):
        assert {d.name for d in cast.dense_dtypes(item).values()} == {"bfloat16"}
    assert cast.experts(1).dtype == ml_dtypes.bfloat16


def _decoded(raw, tensors, kind):
    """HF tensors as they are after a way through a type."""
    _, written = from_hf(raw, tensors, kind)
    _, plain = from_hf(raw, tensors, "F32")
    changed = {}
    for name, (own, shape, raw_bytes) in written.items():
        values = decode(own, np.frombuffer(raw_bytes, np.uint8)).astype(np.float32)
        changed[name] = ("F32", shape, values.tobytes())
    assert changed.keys() == plain.keys()
    return to_hf(raw, tensors, changed)


def to_hf(raw, tensors, written):
    """The HF tensors that become `written`, found by converting element numbers."""
    sizes = np.cumsum([0] + [t.size for t in tensors.values()])
    numbers = {
        name: np.arange(start, start + t.size, dtype=np.float32).reshape(t.shape)
        for (name, t), start in zip(tensors.items(), sizes, strict=False)
    }
    assert sizes[-1] < 1 << 24  # float32 counts so far
    flat = np.empty(sizes[-1], np.float32)
    for name, (_, _, raw_numbers) in from_hf(raw, numbers, "F32")[1].items():
        order = np.frombuffer(raw_numbers, np.float32).astype(np.int64)
        flat[order] = np.frombuffer(written[name][2], np.float32)
    return {
        name: flat[start : start + t.size].reshape(t.shape)
        for (name, t), start in zip(tensors.items(), sizes, strict=False)
    }


def test_blocks_decode_by_hand():
    half = np.float16(0.5).tobytes()
    q8 = half + np.arange(-16, 16, dtype=np.int8).tobytes()
    raw = np.frombuffer(q8, np.uint8)
    np.testing.assert_array_equal(decode("Q8_0", raw), np.arange(-16, 16) * 0.5)
    nibbles = bytes(low | (15 - low) << 4 for low in range(16))
    raw = np.frombuffer(half + nibbles, np.uint8)
    expected = np.concatenate([np.arange(-8, 8), np.arange(7, -9, -1)]) * 0.5
    np.testing.assert_array_equal(decode("Q4_0", raw), expected)
    raw = np.frombuffer(bytes([128]) + nibbles, np.uint8)
    four = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    low = np.concatenate([four, -four])
    expected = 2 * np.concatenate([low, low[::-1]])
    np.testing.assert_array_equal(decode("MXFP4", raw).astype(float), expected)


def test_linear_rope_and_ids_of_tokens_are_read(tmp_path):
    raw, tensors = model("qwen3_moe")
    extra = {
        "qwen3moe.rope.scaling.factor": 3.0,
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
    }
    config = open_checkpoint(
        gguf(tmp_path / "x.gguf", raw, tensors, extra=extra)
    ).config
    assert (config.attention.rope.kind, config.attention.rope.factor) == ("linear", 3)
    assert (config.bos_id, config.eos_ids) == (3, (5, 7))


def test_modules_of_later_tokens_are_dropped_and_named(tmp_path, capsys):
    raw, tensors = model("deepseek_v3")
    said, written = from_hf(raw, tensors)
    said |= {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    written["blk.3.nextn.eh_proj.weight"] = ("F32", (2, 2), bytes(16))
    written["rope_freqs.weight"] = ("F32", (3,), np.ones(3, "f4").tobytes())
    file = write_gguf(tmp_path / "x.gguf", said, written)
    result = convert(file, tmp_path / "ours")
    names = ["blk.3.nextn.eh_proj.weight", "rope_freqs.weight"]
    assert result["dropped"] == names
    line = f"{file}: left out, as the model does not use them: {', '.join(names)}\n"
    assert line in capsys.readouterr().err
    twos = np.full(3, 2, "f4").tobytes()
    written["rope_freqs.weight"] = ("F32", (3,), twos)
    with pytest.raises(ConfigError, match="rope_freqs.weight divides rotary frequenc"):
        open_checkpoint(write_gguf(tmp_path / "y.gguf", said, written))


def test_factors_of_single_rope_frequencies_are_read(tmp_path):
    """As Llama 3.1 has them: 1 for short wavelengths, `factor` for long ones."""
    said, written = from_hf(*model("mixtral"))
    factors = np.array([1, 1, 2.5, 8, 8], "f4")
    written["rope_freqs.weight"] = ("F32", (5,), factors.tobytes())
    got = open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))
    rope = got.config.attention.rope
    assert (rope.kind, rope.attention_factor) == ("longrope", 1.0)
    assert rope.factors == tuple(factors)
    assert rope.original_positions == got.config.max_positions
    assert got.dropped == []
    written["rope_freqs.weight"] = ("F32", (4,), factors[1:].tobytes())
    with pytest.raises(ConfigError, match="short_factor has 4 numbers, expected"):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))


def test_layer_behind_the_last_that_predicts_no_later_token_is_refused(tmp_path):
    raw, tensors = model("olmoe")
    extra = {"olmoe.block_count": 2}
    with pytest.raises(CheckpointError, match="unexpected blk.2.attn_norm"):
        open_checkpoint(gguf(tmp_path / "x.gguf", raw, tensors, extra=extra))


@pytest.mark.parametrize("theta", [9000.0, 8000.0])
def test_rotary_frequencies_are_left_out_if_they_are_the_models(theta, tmp_path):
    said, written = from_hf(*model("olmoe"))
    stored = (theta ** -(np.arange(6, dtype="f4") / 6)).astype("f4")
    name = "blk.1.attn_rot_embd.weight"
    written[name] = ("F32", (6,), stored.tobytes())
    file = write_gguf(tmp_path / "x.gguf", said, written)
    if theta == 9000.0:
        assert open_checkpoint(file).dropped == [name]
        return
    with pytest.raises(CheckpointError, match=f"{name} differs .*theta 9000.0"):
        open_checkpoint(file)


def test_values_that_are_not_finite_are_refused(tmp_path):
    raw, tensors = model("olmoe")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = np.nan
    file = gguf(tmp_path / "x.gguf", raw, tensors)
    with pytest.raises(CheckpointError, match="experts.2.up_proj.weight has NaN"):
        convert(file, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_verify_of_a_file_is_refused(tmp_path):
    file = gguf(tmp_path / "x.gguf", *model("olmoe"))
    with pytest.raises(ConfigError, match="x.gguf is a GGUF file, which states no"):
        convert(file, None, verify=True)


REFUSED = [
    ("olmoe", {"general.architecture": "rwkv"}, "architecture in .* 'rwkv'; known"),
    ("olmoe", {"olmoe.expert_count": 0}, "olmoe.expert_count is absent or 0"),
    ("olmoe", {"olmoe.expert_count": 7}, r"shape \(6, 48\), expected \(7, 48\)"),
    ("olmoe", {"olmoe.logit_scale": 2.0}, "not implemented: olmoe.logit_scale=2.0"),
    ("olmoe", {"olmoe.context_length": "a"}, 'max_position_embeddings is "a"'),
    ("olmoe", {"olmoe.rope.scaling.type": "longrope"}, "short_factor has None"),
    ("olmoe", {"olmoe.rope.dimension_count": 6}, "dimension_count is 6, expected 12"),
    ("olmoe", {"olmoe.expert_gating_func": 2}, "gating_func is 2, expected 1"),
    ("olmoe", {"olmoe.attention.head_count": [4, 4, 5]}, r"is \[4, 4, 5\], expected"),
    ("mixtral", {"llama.expert_weights_norm": False}, "norm is False, expected True"),
    ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "True, expected False"),
    ("deepseek_v2", {"deepseek2.expert_gating_func": 3}, "is 3, expected 1 "),
    ("gpt_oss", {"gpt-oss.rope.scaling.yarn_ext_factor": 0.5}, "is 0.5, expected 1"),
    ("olmoe", {"olmoe.block_count": 99}, "block_count is 99, the file has 39 tensors"),
    ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "gating_func is 1, expected 2"),
    (
        "hunyuan_v1_moe",
        {"hunyuan-moe.expert_shared_count": 2},
        "count is 2, expected 1",
    ),
    (
        "mimo_v2_flash",
        {"mimo2.attention.sliding_window_pattern": [0, 1]},
        r"pattern is \[0, 1\], expected 4 whole numbers",
    ),
    (
        "mimo_v2_flash",
        {"mimo2.attention.head_count_kv": [1, 2, 1, 3]},
        r"head_count_kv is \[1, 2, 1, 3\], expected two kinds of layers",
    ),
    (
        "gemma4_text",
        {"gemma4.attention.head_count_kv": [2, 1, 3, 1]},
        r"head_count_kv is \[2, 1, 3, 1\], expected one in sliding layers",
    ),
]


@pytest.mark.parametrize("family, extra, message", REFUSED)
def test_metadata_that_is_not_implemented_is_refused(family, extra, message, tmp_path):
    file = gguf(tmp_path / "x.gguf", *model(family), extra=extra)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_checkpoint(file)


@pytest.mark.parametrize("family", ["mimo_v2_flash", "gemma4_text"])
def test_layers_without_their_kinds_are_refused(family, tmp_path):
    said, written = from_hf(*model(family))
    for ending in ("head_count_kv", "sliding_window_pattern"):
        (key,) = [name for name in said if name.endswith(ending)]
        del said[key]
        with pytest.raises(CheckpointError, match=f"lacks metadata key {key}"):
            open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))


def test_factors_of_frequencies_that_a_model_cannot_have_are_refused(tmp_path):
    said, written = from_hf(*model("gemma4_text"))
    halves = np.array([1, 1, 2, 2, 1e30, 1e30, 1e30, 1e30], "f4")
    written["rope_freqs.weight"] = ("F32", (8,), halves.tobytes())
    with pytest.raises(ConfigError, match="is 16, expected rope_freqs.weight of 8 num"):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))
    said, written = from_hf(*model("gpt_oss"))  # whose rope is scaled by YaRN
    written["rope_freqs.weight"] = ("F32", (5,), halves[:5].tobytes())
    with pytest.raises(ConfigError, match="type is 'yarn', expected none besides fact"):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", said, written))


HOSTILE = [
    "x", "", "x\ny", -1, 0, 1 << 31, 2.5, float("nan"), float("inf"), -0.5, True, False,
    [], ["x", "y"], [1, 2], [1, 1], [0.5], [True], ["x"] * 330, [-1] * 330, [9e9] * 330,
]  # fmt: skip


# Families whose metadata are read by code of their own.
OWN_CODE = "granitemoeshared exaone_moe mimo_v2_flash llama4_text gemma4_text phimoe"


@pytest.mark.parametrize(
    "family",
    ["olmoe", *slow("qwen2_moe", "deepseek_v3", "gpt_oss", *OWN_CODE.split())],
)
def test_any_value_of_any_key_is_read_or_refused(family, tmp_path):
    """Nothing but our own errors, which end a script in one line."""
    said, written = from_hf(*model(family, vocab_size=330))
    said |= tokenizer_metadata(tiny_tokenizer(), "gpt-2", eos_token_id=0)
    said |= {f"tokenizer.ggml.{name}_token_id": 3 for name in ("bos", "eot", "padding")}
    said |= {f"tokenizer.ggml.add_{name}": False for name in ("bos_token", "eos_token")}
    said |= {"tokenizer.ggml.scores": [0.5] * 320, "tokenizer.chat_template": "x"}
    said |= {"split.count": 0, "general.alignment": 32}
    path = tmp_path / "x.gguf"
    open_checkpoint(write_gguf(path, said, written)).tokenizer_path.read_bytes()
    for key in said:
        for value in HOSTILE:
            write_gguf(path, said | {key: value}, written)
            try:
                reader = open_checkpoint(path)
                assert reader.tokenizer_path is None or load_tokenizer(reader)
            except MoeEdgeError as error:
                assert "\n" not in str(error)


def test_missing_parts_are_refused_by_name(tmp_path):
    said, written = from_hf(*model("olmoe"))
    path = tmp_path / "x.gguf"
    part = written.pop("blk.1.ffn_up_exps.weight")
    with pytest.raises(CheckpointError, match="missing blk.1.ffn_up_exps.weight"):
        open_checkpoint(write_gguf(path, said, written))
    written["blk.1.ffn_up_exps.weight"], written["blk.2.odd"] = part, part
    with pytest.raises(CheckpointError, match="unexpected blk.2.odd"):
        open_checkpoint(write_gguf(path, said, written))
    del written["blk.2.odd"], said["olmoe.context_length"]
    with pytest.raises(CheckpointError, match="lacks metadata key olmoe.context_len"):
        open_checkpoint(write_gguf(path, said, written))
    del written["token_embd.weight"]
    with pytest.raises(CheckpointError, match="lacks the matrix token_embd.weight"):
        open_checkpoint(write_gguf(path, said, written))
