"""Blocks that are decoded only, packed weight by weight, and a file that mixes them."""

import tracemalloc

import numpy as np
import pytest

from moe_edge.convert.gguf_blocks import KINDS, decode
from moe_edge.convert.gguf_k_quants import LAYOUTS
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.progress import say_once
from tests.convert.test_gguf import WIDE, assert_same_weights, model, to_hf
from tests.support.conversion import convert
from tests.support.gguf_files import from_hf, random_blocks, write_gguf
from tests.support.tiny_checkpoints import write_folder

D, M = 0.5, 0.25  # the scales: products below are exact
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def packed(codes, bits: int, run: int) -> list[int]:
    """Bytes of codes: those of a run of bytes begin with the lowest bits of each."""
    packs = 8 // bits
    data = [0] * (len(codes) // packs)
    for i, code in enumerate(codes):
        which, inside = divmod(i, run * packs)
        shift, byte = divmod(inside, run)
        data[which * run + byte] |= int(code) << (bits * shift)
    return data


def half(value: float) -> list[int]:
    return list(np.float16(value).tobytes())


def twelve(scales, minima) -> list[int]:
    """Eight factors of six bits and eight more, as Q4_K holds them."""
    data = [scales[i] | (scales[i + 4] >> 4) << 6 for i in range(4)]
    data += [minima[i] | (minima[i + 4] >> 4) << 6 for i in range(4)]
    return data + [scales[i + 4] & 15 | (minima[i + 4] & 15) << 4 for i in range(4)]


def block(kind: str, rng) -> tuple[list[int], list[float]]:
    """The bytes of one block, and the weights that it stands for."""
    size = KINDS[kind].values
    bits = {"2": 2, "3": 3, "4": 4, "5": 5, "6": 6}[kind.removeprefix("I")[1]]
    codes = rng.integers(0, 1 << bits, size).tolist()
    low4, fifth = [c & 15 for c in codes], [c >> 4 for c in codes]
    factors = rng.integers(0, 64, 16).tolist()
    minima = rng.integers(0, 64, 16).tolist()
    if kind == "Q4_1":
        return half(D) + half(M) + packed(codes, 4, 16), [D * c + M for c in codes]
    if kind in ("Q5_0", "Q5_1"):
        raw = packed(fifth, 1, 1) + packed(low4, 4, 16)
        if kind == "Q5_0":
            return half(D) + raw, [D * (c - 16) for c in codes]
        return half(D) + half(M) + raw, [D * c + M for c in codes]
    if kind == "IQ4_NL":
        return half(D) + packed(codes, 4, 16), [D * IQ4[c] for c in codes]
    if kind == "IQ4_XS":
        raw = half(D) + packed([f >> 4 for f in factors[:8]], 2, 1)
        raw += packed([f & 15 for f in factors[:8]], 4, 1) + packed(codes, 4, 16)
        return raw, [D * (factors[i // 32] - 32) * IQ4[c] for i, c in enumerate(codes)]
    if kind == "Q2_K":
        raw = [f & 15 | (m & 15) << 4 for f, m in zip(factors, minima, strict=True)]
        raw += packed(codes, 2, 32) + half(D) + half(M)
        where = [(i // 16, c) for i, c in enumerate(codes)]
        return raw, [D * (factors[g] & 15) * c - M * (minima[g] & 15) for g, c in where]
    if kind == "Q3_K":
        raw = packed([c >> 2 for c in codes], 1, 32)
        raw += packed([c & 3 for c in codes], 2, 32)
        raw += packed([f & 15 for f in factors], 4, 8)
        raw += packed([f >> 4 for f in factors], 2, 4) + half(D)
        return raw, [D * (factors[i // 16] - 32) * (c - 4) for i, c in enumerate(codes)]
    if kind == "Q6_K":
        signed = [f - 32 for f in factors]
        raw = packed(low4, 4, 64) + packed(fifth, 2, 32)
        raw += [f % 256 for f in signed] + half(D)
        return raw, [D * signed[i // 16] * (c - 32) for i, c in enumerate(codes)]
    raw = half(D) + half(M) + twelve(factors, minima)
    if kind == "Q5_K":
        raw += packed(fifth, 1, 32)
    raw += packed(low4, 4, 32)
    where = [(i // 32, c) for i, c in enumerate(codes)]
    return raw, [D * factors[g] * c - M * minima[g] for g, c in where]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_decode_to_what_was_packed(kind):
    rng = np.random.default_rng(0)
    blocks = [block(kind, rng) for _ in range(5)]
    raw = np.array([each for each, _ in blocks], np.uint8)
    assert raw.shape == (5, KINDS[kind].size)
    expected = np.array([weights for _, weights in blocks], np.float32)
    np.testing.assert_array_equal(decode(kind, raw.reshape(-1)), expected.reshape(-1))


def test_many_blocks_take_little_more_memory_than_their_weights():
    raw = np.zeros(20_000 * KINDS["Q6_K"].size, np.uint8)
    tracemalloc.start()
    decoded = decode("Q6_K", raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.7 * decoded.nbytes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """(file, the same weights as a folder): as Q4_K_M, some tensors in Q6_K."""
    raw, tensors = model("mixtral", **WIDE | dict.fromkeys(WIDE, 256))
    said, written = from_hf(raw, tensors)
    rng = np.random.default_rng(0)
    kinds = {"ffn_down": "Q6_K", "output.w": "Q6_K", "attn_q.": "IQ4_XS", "attn_v": ""}
    for name, (_, shape, _) in written.items():
        if len(shape) > 1 and shape[-1] == 256 and "ffn_gate_inp" not in name:
            kind = next((k for part, k in kinds.items() if part in name), "Q4_K")
            if "blk.2.ffn_down" in name:
                kind = "Q4_K"
            if kind:
                written[name] = (kind, shape, random_blocks(kind, shape, rng))
    plain = {
        name: ("F32", shape, decode(kind, np.frombuffer(data, np.uint8)).tobytes())
        for name, (kind, shape, data) in written.items()
    }
    folder = tmp_path_factory.mktemp("mixed")
    write_folder(folder / "hf", raw, to_hf(raw, tensors, plain))
    return write_gguf(folder / "x.gguf", said, written), folder / "hf"


def test_file_of_mixed_types_is_decoded_and_says_so(mixed, tmp_path, capsys):
    file, folder = mixed
    say_once.cache_clear()
    got, expected = open_checkpoint(file), open_checkpoint(folder)
    num_bytes = 3 * expected.config.moe.num_experts * 3 * 256 * 256 * 4
    assert (
        f"{file}: q4_k+q6_k experts are decoded to float32: {num_bytes:,} bytes; "
    ) in capsys.readouterr().err
    assert got.quantized == "iq4_xs+q4_k+q6_k"
    assert_same_weights(got, expected)
    done = convert(file, tmp_path / "ours")
    assert done["dequantised"] == "q4_k+q6_k"
    assert done["content_sha256"] == convert(folder, tmp_path / "f")["content_sha256"]


def test_mixed_file_is_quantised_again_where_asked_and_says_so(mixed, tmp_path, capsys):
    file, folder = mixed
    say_once.cache_clear()
    asked = {"expert_dtype": "q8_0", "dtype": "bfloat16"}
    done = convert(file, tmp_path / "ours", **asked)
    assert f"{file}: q4_k+q6_k experts are quantised again as q8_0, which rounds" in (
        capsys.readouterr().err
    )
    assert done["expert_dtype"] == "q8_0" and "dequantised" not in done
    convert(folder, tmp_path / "hf", **asked)
    got, expected = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "hf")
    assert got.layout.kind == "q8_0x8"
    assert_same_weights(got, expected)
