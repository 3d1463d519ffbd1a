"""Networks: records, programs, verdicts, and architectures that contradict them."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.papers.coserve.coe.models import MODULES, get_network, make_architecture
from moe_edge.papers.coserve.workload.board import SHAPE, draw
from moe_edge.papers.coserve.workload.coe_graph import Architecture
from tests.papers.coserve.support.coe_boards import DETECTED, tiny_architectures

OUTPUTS = ("ok", "damaged")
IMAGES = draw("component_1", [{"seed": s, "defect": None} for s in range(4)])
SMALL = {
    "resnet101": {"width": 4, "blocks": [1, 1, 1, 1], "classes": 3},
    "yolov5m": {"width": 0.125, "depth": 0.34, "classes": 3},
}


def network_of(name="board_resnet", dtype="bfloat16"):
    return get_network(tiny_architectures(dtype)[name])


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        ("board_resnet", 77_650),
        ("board_detector", 81_492),
        ("resnet101", 44_549_160),  # the last three as published
        ("yolov5m", 21_190_557),
        ("yolov5l", 46_563_709),
    ],
)
def test_modules_have_the_promised_numbers_of_weights(module, numbers):
    outputs = DETECTED if module == "board_detector" else OUTPUTS
    made = make_architecture(module, {}, (64, 64, 3), outputs, "float32")
    network = get_network(made)
    sizes = [int(np.prod(one["shape"])) for one in made.record]
    if module != "board_detector":  # its last layer grows with the image
        assert sum(sizes) == numbers
    assert 0 <= made.record_bytes - 4 * sum(sizes) < 64
    assert made.record_bytes % 64 == 0 and network.record_bytes == made.record_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pack_and_unpack_round_to_the_dtype_and_keep_the_order(dtype):
    network = network_of(dtype=dtype)
    arrays = network.init_arrays(3)
    record_B = network.pack(arrays)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    for name, array in network.unpack(record_B).items():
        np.testing.assert_array_equal(array, arrays[name].astype(kind, copy=False))
    first = network.record[0]
    size = int(np.prod(first["shape"]))
    stored = record_B.view(kind)[:size].reshape(first["shape"])
    np.testing.assert_array_equal(stored, arrays[first["name"]].astype(kind))
    np.testing.assert_array_equal(record_B, network.init(3))


@pytest.mark.parametrize("name", ["board_resnet", "board_detector"])
def test_apply_to_words_equals_the_arrays_and_shares_memory(name):
    network = network_of(name)
    record_B = network.init(1)
    words = network.words(record_B)
    assert np.shares_memory(words, record_B)
    outputs = jax.jit(network.apply)(words, IMAGES)
    again = jax.jit(network.apply_arrays)(network.unpack(record_B), IMAGES)
    np.testing.assert_allclose(outputs, again, atol=1e-5)
    assert np.std(outputs, axis=0).max() > 1e-4  # it sees the images


def test_one_program_serves_every_expert_of_an_architecture():
    apply = jax.jit(network_of().apply)
    outputs = [apply(network_of().words(network_of().init(s)), IMAGES) for s in (0, 1)]
    assert apply._cache_size() == 1
    assert not np.allclose(*outputs)
    assert network_of() is network_of()


@pytest.mark.parametrize(
    "module", ["resnet101", pytest.param("yolov5m", marks=pytest.mark.slow)]
)
def test_large_modules_compute_and_do_not_overflow(module):
    made = make_architecture(module, SMALL[module], (64, 64, 3), OUTPUTS, "float32")
    network = get_network(made)
    images = np.random.default_rng(0).random((2, 64, 64, 3), np.float32)
    outputs = np.asarray(jax.jit(network.apply)(network.words(network.init(0)), images))
    assert outputs.shape == (2, 3) and np.isfinite(outputs).all()
    assert np.abs(outputs[0] - outputs[1]).max() > 0
    verdicts = [verdict for verdict, _ in network.judge(outputs)]
    assert set(verdicts) <= set(OUTPUTS)


def test_judge_of_a_classifier_is_the_largest_logit():
    (first, shares), (second, _) = network_of().judge(np.array([[0, 1], [3, -900.0]]))
    assert (first, second) == ("damaged", "ok")
    assert shares["damaged"] == pytest.approx(1 / (1 + np.exp(-1)))
    assert sum(shares.values()) == pytest.approx(1)


def test_judge_of_a_detector_goes_by_shift_and_turn():
    degrees = np.deg2rad([0, 0, 10, -178, 170])
    shifts = [(0.5, -0.5), (2.0, 0), (0, 0), (0, 0), (4, 0)]
    rows = [(*s, np.cos(d), np.sin(d)) for s, d in zip(shifts, degrees, strict=True)]
    judged = network_of("board_detector").judge(np.array(rows))
    wrong = "wrong_polarity"
    assert [v for v, _ in judged] == ["ok", "misaligned", "misaligned", wrong, wrong]
    assert judged[3][1]["turn"] == pytest.approx(-178)


def changed(architecture: Architecture, **changes) -> Architecture:
    return dataclasses.replace(architecture, **changes)


WRONG = [
    ({"module": "vgg"}, "unknown module 'vgg'; known: board_detector, board_resnet"),
    ({"options": {"depth": 2}}, "has no option 'depth'; known: width"),
    ({"options": {"width": 0}}, "width must be a positive whole number, got 0"),
    ({"options": {"width": 8}}, r"tensor 0 .* stem.kernel \[3, 3, 3, 4\], .* 3, 8\]"),
    ({"dtype": "float16"}, "'float16'; did you mean 'bfloat16'. known: b"),
    ({"dtype": "float32"}, "record_bytes of board_resnet is .* in float32 take "),
    ({"record_bytes": 64}, "record_bytes of board_resnet is 64, "),
    ({"record": ()}, "board_resnet says no record, .* 29 tensors"),
    ({"input_shape": (30, 32, 3)}, r"\[30, 32, 3\], expected sides that are mult.* 8"),
    ({"input_shape": (32, 32)}, r"\[32, 32\], expected \[H, W, 3\]"),
    ({"outputs": None}, "outputs of board_resnet are None, expected some of ok"),
    ({"outputs": ["ok", "ok"]}, r"\['ok', 'ok'\], expected .* each once"),
    ({"outputs": ["ok", "bent"]}, "'bent'.* expected some of ok, damaged"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_architecture_that_contradicts_its_network_is_refused(changes, message):
    good = tiny_architectures()["board_resnet"]
    assert get_network(good)
    with pytest.raises(ConfigError, match=message):
        get_network(changed(good, **changes))


def test_record_with_a_tensor_less_is_refused():
    good = tiny_architectures()["board_resnet"]
    with pytest.raises(ConfigError, match="has 28 tensors, this network has 29"):
        get_network(changed(good, record=good.record[:-1]))


def test_refused_outputs_of_detectors_and_classes():
    with pytest.raises(ConfigError, match=r"\['ok', 'damaged'\], expected \['ok', 'mi"):
        make_architecture("board_detector", {}, SHAPE, OUTPUTS)
    for module in sorted(SMALL):
        with pytest.raises(ConfigError, match="has 1 classes for 2 outputs"):
            make_architecture(module, {"classes": 1}, (64, 64, 3), OUTPUTS)
    with pytest.raises(ConfigError, match="depth is 3, expected above 0 and at most 2"):
        MODULES["yolov5l"](depth=3)


def test_words_of_another_size_are_refused():
    with pytest.raises(CheckpointError, match=r"uint8 \[63\], expected uint8 \[\d+\]"):
        network_of().words(np.zeros(63, np.uint8))
