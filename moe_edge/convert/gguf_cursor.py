"""Takes the header of a GGUF file apart without trusting it.

Every count and length is held against the bytes that are there before anything is made
from it, so a file that lies is refused at once and in one line.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import CheckpointError

_MAX_NAME = 65_535  # bytes of a key or a tensor's name
_MAX_STRING = 16 << 20
_MAX_ITEMS = 16 << 20  # of an array, a few times the largest vocabulary
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B"}
_NUMBERS |= {10: "Q", 11: "q", 12: "d"}


class Cursor:
    """Takes a file's header apart, front to back."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self._data, self._size = path, data, len(data)
        self.position = 0

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}; copy it again")

    def skip(self, count: int, what: str) -> int:
        """Position of the next `count` bytes, which are there."""
        start = self.position
        if count > self._size - start:
            raise CheckpointError(
                f"{self.path} is damaged or truncated: {what} takes {count} bytes from "
                f"byte {start}, the file has {self._size}; copy it again"
            )
        self.position = start + count
        return start

    def number(self, code: str, what: str):
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self._data, self.skip(layout.size, what))[0]

    def count(self, what: str, limit: int) -> int:
        found = self.number("Q", what)
        if found > limit:
            raise self.bad(f"{what} is {found}, expected at most {limit}")
        return found

    def string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.count(f"the length of {what}", limit)
        start = self.skip(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8 ({error.reason})") from error

    def name(self, what: str) -> str:
        """A key or name, fit to stand in a message of one line."""
        found = self.string(what, _MAX_NAME)
        if not found.isprintable():
            raise self.bad(f"{what} is {found[:60]!r}, expected printable characters")
        return found

    def value(self, key: str) -> Any:
        """A metadata value; arrays of numbers as numpy's, of texts as lists."""
        kind = self.number("I", f"the type of {key}")
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind, key)

    def _scalar(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind not in _NUMBERS:
            raise self.bad(f"{key} has value type {kind}, expected 0 to 12")
        found = self.number(_NUMBERS[kind], key)
        if kind == _BOOL:
            if found > 1:
                raise self.bad(f"{key} is the byte {found}, expected true or false")
            return bool(found)
        # The shortest decimal number that is this float32: 1e-6, not 9.99999997e-7.
        return float(str(np.float32(found))) if kind == 6 else found

    def _array(self, key: str) -> Any:
        kind = self.number("I", f"the item type of {key}")
        count = self.count(f"the length of {key}", _MAX_ITEMS)
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS:
            raise self.bad(f"{key} is an array of type {kind}, expected a flat one")
        dtype = np.dtype("?" if kind == _BOOL else "<" + _NUMBERS[kind])
        start = self.skip(count * dtype.itemsize, key)
        return np.frombuffer(self._data, dtype, count, start).copy()

    def _strings(self, key: str, count: int) -> list[str]:
        """Texts one after another: a vocabulary has several 100,000, so in one loop."""
        if 8 * count > self._size - self.position:
            self.skip(8 * count, f"the texts of {key}")  # raises
        data, texts = self._data, []
        for i in range(count):
            start = self.position + 8
            length = int.from_bytes(data[self.position : start], "little")
            end = start + length
            try:
                if end > self._size or length > _MAX_STRING:
                    raise ValueError
                texts.append(data[start:end].decode("utf-8"))
            except ValueError:
                self.string(f"{key}[{i}]")  # says what is wrong
                raise
            self.position = end
        return texts
