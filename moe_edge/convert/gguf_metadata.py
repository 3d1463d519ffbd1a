"""The metadata of one architecture in a GGUF file, which remembers what was asked for.

A key of the architecture that nobody asks for is refused by name: it may change what
the model computes.
"""

from typing import Any

import numpy as np

from moe_edge.convert.gguf_file import GgufFile
from moe_edge.core.checks import CheckpointError, ConfigError

ADVICE = "convert the model from its Hugging Face folder instead"
# Keys that never change what is computed, or say what tensors say.
_HARMLESS = (
    "vocab_size",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "expert_shared_feed_forward_length",
)


class Metadata:
    """The keys that begin with the architecture's name.

    Attributes:
      tensors: names in the file.
      needed: those of them whose weights say what a config would say.
    """

    def __init__(self, file: GgufFile, arch: str):
        self._file, self._prefix = file, arch + "."
        self._used = set(_HARMLESS)
        self.tensors, self.needed = file.tensors, set[str]()

    @property
    def layers(self) -> int:
        """Without those behind the last, modules that predict later tokens."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def even_head(self) -> int:
        """A head's width, where the model's is shared out evenly."""
        return self.integer("embedding_length") // max(self.heads, 1)

    def weights(self, name: str) -> list[float] | None:
        """The numbers of a tensor, None if there is none."""
        if name not in self.tensors:
            return None
        self.needed.add(name)
        return self._file.read(name).reshape(-1).astype(np.float64).tolist()

    def raw(self, key: str, default: Any = None) -> Any:
        """A value as it stands in the file, arrays as lists."""
        self._used.add(key)
        value = self._file.metadata.get(self._prefix + key, default)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def get(self, key: str, default: Any = None) -> Any:
        """A value; of a list of equal values, one a layer, that value."""
        value = self.raw(key, default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise ConfigError(
                    f"{self._file.path}: {self._prefix}{key} is {str(value)[:60]}, "
                    f"expected the same value for all layers; {ADVICE}"
                )
            value = value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self._lacks(key)
        return value

    def _lacks(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path} lacks metadata key {self._prefix}{key}; {ADVICE}"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer that is computed with here; others are judged by `families.py`."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.bad(key, value, "an integer of 0 or more")
        return value

    def each_layer(self, key: str) -> list[int] | None:
        """A whole number or truth value of every layer, as whole numbers.

        A single one stands for all layers; those of modules behind the last are cut
        off. None: the file is silent.
        """
        value, layers = self.raw(key), self.layers
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or any(type(v) not in (int, bool) for v in values):
            raise self.bad(key, value, f"{layers} whole numbers")
        return [int(each) for each in values[:layers]]

    def need_each_layer(self, key: str) -> list[int]:
        values = self.each_layer(key)
        if values is None:
            raise self._lacks(key)
        return values

    def only(self, key: str, *allowed) -> None:
        """Refuses `key` unless it is absent or one of `allowed`."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.bad(key, value, " or ".join(f"{each!r:.60}" for each in allowed))

    def bad(self, key: str, value, expected: str) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: {self._prefix}{key} is {value!r:.60}, expected "
            f"{expected}; {ADVICE}"
        )

    def finish(self) -> None:
        """Refuses keys that nobody asked for."""
        unknown = [
            f"{key}={value!r:.60}"
            for key, value in self._file.metadata.items()
            if key.startswith(self._prefix)
            and key.removeprefix(self._prefix) not in self._used
        ]
        if unknown:
            raise ConfigError(
                f"{self._file.path} has metadata that may change what the model "
                f"computes and is not implemented: {', '.join(sorted(unknown)[:8])}; "
                f"{ADVICE}"
            )
