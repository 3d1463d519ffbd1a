"""Weights of 4 or 8 bits, packed into int32 words: three layouts.

The value is `(q - zero) * scale`, where zero and scale belong to a group of inputs of
one output. A word holds n = 32 / bits codes, the first in its lowest bits:

  pack-quantized (compressed-tensors)  X.weight_packed [out, in / n], X.weight_scale
      [out, G], X.weight_shape [2]; X.weight_zero_point [out / n, G] packed along out,
      else zero is half the range; X.weight_g_idx [in] is the group of each input
  awq (gemm)  X.qweight [in, out / n], X.qzeros [G, out / n], X.scales [G, out]; the
      eight codes of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7
  gptq  X.qweight [in / n, out] packed along in, X.qzeros [G, out / n], X.scales
      [G, out]; X.g_idx [in] is the group of each input, in any order with desc_act.
      Zeros are stored less one, but by version 2

GPTQ's writers subtract the one from whole words, so it is added to whole words: a zero
of 0 borrows from its neighbour.
Source: compressed-tensors 0.20, compressors/pack_quantized; AutoAWQ's gemm modules;
GPTQModel, conversion between its versions 1 and 2.
"""

import abc

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16
from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.packed_tensor import FLOATS, PackedTensor, rounded, strips
from moe_edge.core.checks import CheckpointError
from moe_edge.model.quantised import BLOCK, BLOCK_BYTES

BITS = (4, 8)
_WORD = np.dtype(np.int32)
_WHOLE = (_WORD, np.dtype(np.int64))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each code of a word


def unpack(words: np.ndarray, bits: int, axis: int = 1) -> np.ndarray:
    """uint8 codes of a matrix of int32 words, n times as many along `axis`."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    shifts = shifts[:, None] if axis == 0 else shifts
    codes = np.expand_dims(words.view(np.uint32), axis + 1) >> shifts
    codes = (codes & np.uint32((1 << bits) - 1)).astype(np.uint8)
    rows, cols = words.shape
    return codes.reshape((-1, cols) if axis == 0 else (rows, -1))


class PackedInts(PackedTensor):
    """One weight [out, in].

    Args:
      bits: of a code, one of BITS.
      group: inputs that share a scale; None: all.
    """

    def __init__(
        self, name: str, parts: dict[str, Stored], bits: int, group: int | None
    ):
        self._bits, self._per, self._group = bits, 32 // bits, group
        self._scales = parts["scale"]
        super().__init__(name, parts)
        if self._scales.dtype == np.float16:
            self.dtype = np.dtype(np.float16)

    def _matrix(self, role: str) -> tuple[int, int]:
        """The shape of a part that is a matrix of words."""
        part = self.parts[role]
        if len(part.shape) != 2:
            raise CheckpointError(
                f"{part.name} has shape {tuple(part.shape)}, expected a matrix; copy "
                "the file again"
            )
        self._check(role, tuple(part.shape), (_WORD,))
        return tuple(part.shape)

    def _num_groups(self, inputs: int) -> int:
        return -(-inputs // (self._group or inputs or 1))

    def _groups(self, role: str) -> np.ndarray:
        """The group of each input."""
        inputs = self.shape[1]
        if role not in self.parts:
            return np.arange(inputs) // (self._group or inputs)
        groups, count = self._array(role), self._num_groups(inputs)
        if (groups == -1).all():  # compressed-tensors: they are in order
            return np.arange(inputs) // (self._group or inputs)
        if groups.size and not 0 <= groups.min() <= groups.max() < count:
            raise CheckpointError(
                f"{self.parts[role].name} names groups {groups.min()} to "
                f"{groups.max()}, expected 0 to {count - 1}; copy the file again"
            )
        return groups


class PackQuantized(PackedInts):
    """Of `compressed-tensors`."""

    def _checked_shape(self):
        rows, words = self._matrix("packed")
        inputs = words * self._per
        groups = self._num_groups(inputs)
        scales = tuple(self._scales.shape)
        if not (groups == 1 and scales in ((), (1,), (1, 1), (rows,))):
            scales = (rows, groups)
        self._check("scale", scales, FLOATS)
        self._check("shape", (2,), _WHOLE)
        if "zero" in self.parts:
            self._check("zero", (-(-rows // self._per), groups), (_WORD,))
        if "g_idx" in self.parts:
            self._check("g_idx", (inputs,), _WHOLE)
        return rows, inputs

    def _check_stated(self) -> None:
        stated = tuple(self._array("shape").tolist())
        if stated != self.shape:
            raise CheckpointError(
                f"{self.parts['shape'].name} says {stated}, expected {self.shape} of "
                f"the packed words of {self.name}; copy the file again"
            )

    def why_not_kept(self, kind):
        cols = self.shape[1]
        across, dtype = self._group or cols, self._scales.dtype
        if kind != "int4" or self._bits != 4:
            return f"its codes are whole numbers of {self._bits} bits"
        if {"zero", "g_idx"} & self.parts.keys():
            return "it has zero points or an order of its own, expected neither"
        if dtype != BFLOAT16:
            return f"its scales are {dtype.name}, expected bfloat16"
        if across % BLOCK and across < cols:
            return f"{across} weights share a scale, expected a multiple of {BLOCK}"
        return None

    def blocks(self, kind, expert=None):
        self._check_stated()
        (rows, cols), count = self.shape, self._num_groups(self.shape[1])
        scales = self._array("scale").reshape(-1, count).view(np.uint16)
        across = np.arange(0, cols, BLOCK) // (self._group or cols)
        stored = np.empty((rows, cols // BLOCK, BLOCK_BYTES[kind]), np.uint8)
        each = np.broadcast_to(scales, (rows, count))[:, across]
        stored[..., :2] = each.astype("<u2")[..., None].view(np.uint8)
        packed = self._array("packed")
        for first, last in strips(rows, cols):
            codes = unpack(packed[first:last], 4).reshape(last - first, -1, BLOCK)
            halves = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
            stored[first:last, :, 2:] = halves[0] | halves[1] << 4
        return stored.reshape(rows, -1)

    def read(self, dtype, expert=None):
        self._check_stated()
        rows, cols = self.shape
        groups, count = self._groups("g_idx"), self._num_groups(cols)
        scales = self._array("scale").astype(np.float32).reshape(-1, count)
        scales = np.broadcast_to(scales, (rows, count))
        zeros = np.full(scales.shape, 1 << (self._bits - 1), np.float32)
        if "zero" in self.parts:
            codes = unpack(self._array("zero"), self._bits, axis=0)
            zeros = codes[:rows].astype(np.float32)
        packed, out = self._array("packed"), np.empty(self.shape, dtype)
        for first, last in strips(rows, cols):
            values = unpack(packed[first:last], self._bits).astype(np.float32)
            values -= zeros[first:last].take(groups, axis=1)
            values *= scales[first:last].take(groups, axis=1)
            out[first:last] = rounded(values, dtype)
        return out


class _ByInputs(PackedInts):
    """AWQ and GPTQ: stored as [in, out], a row of scales and zeros for each group."""

    def _check_groups(self, inputs: int, outputs: int) -> tuple[int, int]:
        groups = self._num_groups(inputs)
        self._check("scale", (groups, outputs), FLOATS)
        self._check("zero", (groups, outputs // self._per), (_WORD,))
        if "g_idx" in self.parts:
            self._check("g_idx", (inputs,), _WHOLE)
        return outputs, inputs

    @abc.abstractmethod
    def _codes(self, words: np.ndarray, first: int, last: int) -> np.ndarray:
        """Codes [last - first, out] of some inputs."""

    @abc.abstractmethod
    def _zeros(self) -> np.ndarray:
        """Zeros [G, out]."""

    def read(self, dtype, expert=None):
        outputs, inputs = self.shape
        groups, words = self._groups("g_idx"), self._array("words")
        zeros = self._zeros().astype(np.float32)
        scales = self._array("scale").astype(np.float32)
        out = np.empty(self.shape, dtype)
        for first, last in strips(inputs, outputs, multiple=self._per):
            at = groups[first:last]
            values = self._codes(words, first, last).astype(np.float32)
            values -= zeros[at]
            values *= scales[at]
            out[:, first:last] = rounded(values, dtype).T
        return out


class Awq(_ByInputs):
    """Of AutoAWQ, version gemm."""

    def _checked_shape(self):
        inputs, words = self._matrix("words")
        return self._check_groups(inputs, words * self._per)

    def _in_order(self, words: np.ndarray) -> np.ndarray:
        codes = unpack(words, self._bits).reshape(len(words), -1, self._per)
        return codes[..., np.argsort(_AWQ_ORDER)].reshape(len(words), -1)

    def _codes(self, words, first, last):
        return self._in_order(words[first:last])

    def _zeros(self):
        return self._in_order(self._array("zero"))


class Gptq(_ByInputs):
    """Of AutoGPTQ and GPTQModel.

    Args:
      less_one: whether zeros are stored less one.
    """

    def __init__(self, name, parts, bits, group, less_one: bool):
        self._less_one = less_one
        super().__init__(name, parts, bits, group)

    def _checked_shape(self):
        words, outputs = self._matrix("words")
        return self._check_groups(words * self._per, outputs)

    def _codes(self, words, first, last):
        return unpack(words[first // self._per : last // self._per], self._bits, axis=0)

    def _zeros(self):
        words = self._array("zero").view(np.uint32)
        if self._less_one:
            words = words + np.uint32(sum(1 << bit for bit in range(0, 32, self._bits)))
        return unpack(words, self._bits)


def find_words(files: dict[str, Stored], roles: dict[str, str], make) -> list:
    """The packed weights among the tensors of a folder.

    Args:
      roles: role -> what follows the module's name; the first one finds them, those
        that end with "?" may be missing.
      make: (name, role -> tensor) -> the weight of that name.
    Raises:
      CheckpointError: one without a part that it needs, or next to an unpacked copy.
    """
    suffixes = {role.rstrip("?"): suffix for role, suffix in roles.items()}
    needed = {role for role in roles if not role.endswith("?")}
    ending, found = next(iter(suffixes.values())), []
    for name in files:
        if not name.endswith(ending):
            continue
        module, parts = name.removesuffix(ending), {}
        for role, suffix in suffixes.items():
            if (part := files.get(module + suffix)) is not None:
                parts[role] = part
        if not needed <= parts.keys():
            lacking = sorted(module + suffixes[r] for r in needed - parts.keys())
            raise CheckpointError(
                f"packed tensor {name} lacks its {' and '.join(lacking)}; copy the "
                "folder again"
            )
        if module + ".weight" in files:
            raise CheckpointError(
                f"{name} and {module}.weight are one weight twice; remove the one that "
                "is out of date"
            )
        found.append(make(module + ".weight", parts))
    return found
