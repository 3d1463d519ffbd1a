"""The prompt cache in a folder, for the next server of the same model.

One file a kept beginning, named by a hash of what its bits depend on: the model, how
and where it is computed, K, and the tokens. A file that is torn or of another model is
left alone.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from moe_edge.core.progress import say
from moe_edge.engine.prompt_cache import Kept
from moe_edge.engine.slots import RowSlots
from moe_edge.kernels import native
from moe_edge.model import cached_attention

SUFFIX = ".kept.safetensors"
VERSION = 1


class PromptFiles:
    """Kept beginnings of prompts in a folder.

    Args:
      model: what names the model and how it is computed, as JSON; whatever else bits
        depend on is added here.
    """

    def __init__(self, folder: str | Path, model: Mapping[str, Any]):
        self._folder = Path(folder)
        device = jax.local_devices()[0]
        where = [jax.__version__, device.platform, device.device_kind]
        kernels = [native.describe(), cached_attention.describe()]
        facts = {**model, "version": VERSION, "kernels": kernels, "on": where}
        self._model = hashlib.sha256(
            json.dumps(facts, sort_keys=True).encode()
        ).digest()

    def load(self, slots: RowSlots) -> int:
        """Fills a prompt cache, as far as it has room; returns how many were read."""
        found = self._folder.glob(f"*{SUFFIX}")
        paths = sorted(found, key=lambda path: path.stat().st_mtime)
        count = 0
        for path in paths:  # the youngest last: it stays the longest
            try:
                arrays = safetensors.numpy.load(path.read_bytes())
                k, tokens = int(arrays["k"][0]), tuple(arrays["tokens"].tolist())
                is_ours = path.name == self._name(k, tokens)
            except (OSError, SafetensorError, KeyError, IndexError, ValueError):
                continue
            if is_ours:
                count += slots.keep(k, tokens, _layers(arrays))
        if count:
            say(f"prompt cache: {count} beginnings read from {self._folder}")
        return count

    def save(self, slots: RowSlots) -> int:
        """Writes what a prompt cache holds; the oldest files beyond its size go.

        Returns how many were written anew. A folder that cannot be written is told, and
        no error: the server is about to end.
        """
        try:
            return self._save(slots)
        except OSError as error:
            say(f"prompt cache: {self._folder} cannot be written: {error}")
            return 0

    def _save(self, slots: RowSlots) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        count, left = 0, slots.cache.budget_bytes
        for k, kept in slots.cache.youngest_first():
            path = self._folder / self._name(k, kept.tokens)
            left -= kept.num_bytes
            if path.exists():
                os.utime(path)
                continue
            data = safetensors.numpy.save(_arrays(k, kept))
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(data)
            partial.rename(path)
            count += 1
        ours = {self._name(k, kept.tokens) for k, kept in slots.cache.youngest_first()}
        others = [p for p in self._folder.glob(f"*{SUFFIX}") if p.name not in ours]
        for path in sorted(others, key=lambda path: -path.stat().st_mtime):
            left -= path.stat().st_size
            if left < 0:
                path.unlink()
        return count

    def _name(self, k: int, tokens: tuple[int, ...]) -> str:
        given = self._model + np.array([k, *tokens], "<i8").tobytes()
        return hashlib.sha256(given).hexdigest()[:40] + SUFFIX


def _arrays(k: int, kept: Kept) -> dict[str, np.ndarray]:
    arrays = {"k": np.array([k], np.int32), "tokens": np.array(kept.tokens, np.int32)}
    for layer, cache in enumerate(kept.caches):
        for name, array in cache.items():
            arrays[f"{layer}.{name}"] = np.ascontiguousarray(array)
    return arrays


def _layers(arrays: Mapping[str, np.ndarray]) -> dict[int, dict[str, np.ndarray]]:
    found: dict[int, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        layer, dot, name = key.partition(".")
        if dot and layer.isdecimal():
            found.setdefault(int(layer), {})[name] = array
    return found
