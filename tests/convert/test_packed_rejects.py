"""Quantised folders that are refused, by the field or by the tensor."""

import contextlib
import json
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.quantize import quantization
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.packed_weights import FORMATS, packed_folder
from tests.support.quantised import FP8
from tests.support.tiny_checkpoints import write_folder

AWQ, GPTQ, INT4, FP8_ROWS = (
    FORMATS[name].section for name in ("awq", "gptq", "int4", "fp8 rows")
)
PROJECTION = "model.layers.0.self_attn.o_proj"


def of_weights(section, **changes):
    """The section with changes to what it says of weights."""
    group = section["config_groups"]["group_0"]
    group = group | {"weights": group["weights"] | changes}
    return section | {"config_groups": {"group_0": group}}


def of_group(section, **changes):
    group = section["config_groups"]["group_0"] | changes
    return section | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (AWQ | {"bits": 3}, "of awq: bits is 3, expected 4; convert from an unq"),
        (AWQ | {"version": "gemv"}, 'version is "gemv", expected "gemm"'),
        (AWQ | {"zero_point": False}, "zero_point is false, expected true"),
        (AWQ | {"group_size": 0}, "group_size is 0, expected a whole number >= 1"),
        (AWQ | {"sparse": 2}, r'awq has unknown fields {"sparse": 2}'),
        (GPTQ | {"bits": 3}, "of gptq: bits is 3, expected 4 or 8"),
        (GPTQ | {"bits": 4.0}, "bits is 4.0, expected 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin", exp'),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is true, expected fal"),
        (GPTQ | {"dynamic": {"+:a": {"bits": 8}}}, "dynamic is .* no module with"),
        (INT4 | {"format": "marlin-24"}, 'format is "marlin-24", expected "pack-qu'),
        (INT4 | {"format": "nvfp4-pack-quantized"}, 'format is "nvfp4-pack-quant'),
        (
            INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            'sparsity_config is {"format": "sparse-24-bitmask"}, expected a format',
        ),
        (INT4 | {"transform_config": {"a": 1}}, 'unknown fields {"transform_config'),
        (INT4 | {"config_groups": {}}, "config_groups is {}, expected an object of"),
        (INT4 | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 is .*, expected an"),
        (of_group(INT4, targets="Linear"), 'group_0: targets is "Linear", expected a'),
        (of_group(INT4, targets=["re:("]), r'targets is "re:\(", expected a regular'),
        (of_group(INT4, targets=["re:(a+)+$"]), "expected no group that is repeated"),
        (of_group(INT4, weights=None), "group_0: weights is null, expected an obj"),
        (of_group(INT4, format="mixed-precision"), "group_0: format is"),
        (of_group(INT4, extra=1), r'group_0 has unknown fields {"extra": 1}'),
        (of_weights(INT4, num_bits=3), "group_0: num_bits is 3, expected 4 or 8"),
        (of_weights(INT4, type="float"), 'type is "float", expected "int"'),
        (of_weights(INT4, dynamic=True), "dynamic is true, expected false"),
        (of_weights(INT4, strategy="block"), 'strategy is "block", expected "ten'),
        (of_weights(INT4, group_size=None), "group_size is null, expected a whole"),
        (
            of_weights(INT4, strategy="tensor", symmetric=False),
            'strategy is "tensor", expected channel or group of weights with zeros',
        ),
        (of_weights(INT4, block_structure=[1, 2]), "expected none without strategy"),
        (of_weights(INT4, rotate=1), r'group_0 has unknown fields {"rotate": 1}'),
        (of_weights(FP8_ROWS, num_bits=4), "num_bits is 4, expected 8"),
        (of_weights(FP8_ROWS, symmetric=False), "symmetric is false, expected true"),
        (of_weights(FP8_ROWS, strategy="block"), "block_structure is null, expected"),
    ],
)
def test_field_that_is_not_supported_is_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        quantization({"quantization_config": section})


ANYTHING = (None, True, 0, -1, 3, 1.5, 10**30, "x", [], [1], [0, 1], {}, {"a": 1})


def replaced(value):
    """The JSON value with each part of it replaced by anything."""
    yield from ANYTHING
    for key in value if isinstance(value, dict) else ():
        yield from (value | {key: new} for new in replaced(value[key]))
        yield {name: kept for name, kept in value.items() if name != key}


@pytest.mark.parametrize("section", [AWQ, GPTQ, INT4, FP8_ROWS, FP8])
def test_any_value_of_any_field_is_read_or_refused(section):
    for changed in replaced(section):
        with contextlib.suppress(ConfigError):
            quantization({"quantization_config": changed})


@pytest.mark.parametrize("name", ["int4 order", "awq", "gptq", "int8 rows", "fp8 rows"])
def test_any_shape_of_any_part_is_read_or_refused(name):
    format = FORMATS[name]
    scheme = quantization({"quantization_config": format.section})
    stored, _ = format.pack(np.random.default_rng(0), "m.weight", (32, 48))
    for name in stored:
        for shape in ((), (0,), (48,), (0, 0), (32, 0), (1, 1), (2, 32, 48), (1,) * 4):
            for dtype in (stored[name].dtype, np.int32, np.int8, np.float16, np.bool_):
                changed = stored | {name: np.zeros(shape, dtype)}
                files = {n: Header(a.shape, a.dtype, n) for n, a in changed.items()}
                with contextlib.suppress(CheckpointError):
                    scheme.find(files)


def test_biases_of_eight_bits_are_refused():
    """Also where those of all experts are a matrix."""
    scheme = quantization({"quantization_config": FP8_ROWS})
    name, float8 = "mlp.experts.down_proj_bias", np.dtype(ml_dtypes.float8_e4m3fn)
    files = {name: Header((6, 48), float8, name)}
    scale = name + "_scale"
    files[scale] = Header((6, 1), np.dtype(np.float32), scale)
    with pytest.raises(CheckpointError, match=r"bias is FP8 of shape \(6, 48\), exp"):
        scheme.find(files)


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_scale_of_activations_that_the_method_has_not_is_refused(name, tmp_path):
    """It may be a factor of the model, which is another one without it."""
    folder, _, stored, _ = packed_folder(tmp_path / "hf", FORMATS[name])
    scale = PROJECTION + ".input_scale"
    raw = json.loads((folder / "config.json").read_text())
    write_folder(folder, raw, stored | {scale: np.ones((), np.float32)})
    with pytest.raises(CheckpointError, match=scale):
        open_checkpoint(folder)


class Header(NamedTuple):
    """A tensor of which only the header is known."""

    shape: tuple
    dtype: np.dtype
    name: str
    file: str = "there"

    @property
    def entry(self):
        return self.dtype, self.shape, 0


def refused(folder, raw, tensors, message):
    hf = write_folder(folder, raw, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(hf).content_sha256()


_48 = "{}.weight has shape .64, 40., expected .64, 48."
PARTS = [
    ("int4", "weight_packed", lambda a: a[:, 1:], _48),
    ("int4", "weight_packed", lambda a: a[0], r"shape \(6,\), expected a matrix"),
    ("int4", "weight_packed", lambda a: a.astype("i8"), "is int64, expected int32"),
    ("int4", "weight_scale", None, "lacks its {}.weight_scale; copy"),
    ("int4", "weight_scale", lambda a: a[:, :1], r"\(64, 1\), expected \(64, 3\)"),
    ("int4", "weight_shape", lambda a: a[:1], r"shape \(1,\), expected \(2,\)"),
    ("int4", "weight_shape", lambda a: a[::-1], r"says \(48, 64\), expected \(64, 48"),
    ("int4 zeros", "weight_zero_point", None, "{} has no weight_zero_point, but its"),
    ("int4 zeros", "weight_zero_point", lambda a: a.T, r"\(3, 8\), expected \(8, 3\)"),
    ("int4 order", "weight_g_idx", lambda a: a + 1, "groups 1 to 3, expected 0 to 2"),
    ("int4 order", "weight_g_idx", None, "{} has no weight_g_idx, but its group has"),
    ("awq", "qzeros", lambda a: a[:2], r"\(2, 8\), expected \(3, 8\) next to"),
    ("awq", "scales", None, "packed tensor {}.qweight lacks its {}.scales"),
    ("gptq", "qzeros", lambda a: a[:, :2], r"\(3, 2\), expected \(3, 8\) next to"),
    ("gptq", "scales", lambda a: a.astype("i4"), "is int32, expected float32 or"),
    ("gptq", "g_idx", lambda a: a[1:], r"g_idx has shape \(47,\), expected \(48,\)"),
    ("gptq order", "g_idx", lambda a: a - 1, "groups -1 to 1, expected 0 to 2"),
    ("int8 rows", "weight_zero_point", lambda a: a[1:], r"\(63, 1\), expected \(64, 1"),
]


@pytest.mark.parametrize(("format", "part", "change", "message"), PARTS)
def test_part_that_does_not_belong_is_refused(format, part, change, message, tmp_path):
    hf, _, stored, _ = packed_folder(tmp_path / "hf", FORMATS[format])
    name = f"{PROJECTION}.{part}"
    tensors = {n: a for n, a in stored.items() if n != name}
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(stored[name]))
    raw = json.loads((hf / "config.json").read_text())
    refused(tmp_path / "b", raw, tensors, message.replace("{}", PROJECTION))


def test_packed_weight_twice_or_of_no_group_is_refused(tmp_path):
    hf, _, stored, wanted = packed_folder(tmp_path / "hf", FORMATS["int4"])
    raw = json.loads((hf / "config.json").read_text())
    name, number = PROJECTION + ".weight", iter("abcdef")
    for more, section, message in (
        ({name: wanted[name]}, INT4, f"{name}_packed and {name} are one weight twice"),
        ({name + "_x": wanted[name]}, INT4, f"unexpected {name}_x"),
        (
            {},
            of_group(INT4, targets=["re:.*experts"]),
            "is packed, but no group targets it",
        ),
        (
            {},
            of_weights(INT4, symmetric=False),
            "no weight_zero_point, .* not sym",
        ),
        (
            {},
            FP8_ROWS,
            "is packed, but its group has another",
        ),
    ):
        raw["quantization_config"] = section
        refused(tmp_path / next(number), raw, stored | more, message)
