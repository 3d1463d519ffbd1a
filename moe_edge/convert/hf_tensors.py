"""The tensors of a Hugging Face folder by their published names.

A file may name them as transformers 5 does in memory, without `model.` in front, or
hold tensors that no model computes with. The latter are set aside, and only if they are
what their names say: rotary frequencies of the config's rope, modules that predict
later tokens, a shared expert without neurons.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES
from moe_edge.convert import rules
from moe_edge.convert.safetensors_reader import SafetensorsFile, open_folder
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig
from moe_edge.model.rope_frequencies import inverse_frequencies

EMBED, HEAD = rules.TOP["embed"], rules.TOP["head"]
_FREQUENCIES = "rotary_emb.inv_freq"
_LAYER_ID = re.compile(r"model\.layers\.(\d{1,9})\.")
# Modules that predict later tokens: under a name of their own, or as layers behind the
# last one, which hold the projection that joins a hidden state and an embedding.
_LATER_TOKENS = re.compile(r"(?:model\.)?mtp[._]")
_JOINS = "eh_proj."
_LATER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


class Stored(NamedTuple):
    """A tensor of a file; of a file that is not there (None) only the name is known."""

    file: SafetensorsFile | None
    name: str  # in the file

    @property
    def entry(self) -> tuple[np.dtype, tuple[int, ...], int]:
        """As of `SafetensorsFile.entries`, where the file is there."""
        return self.file.entries[self.name]

    @property
    def dtype(self) -> np.dtype | None:
        return None if self.file is None else self.file.entries[self.name][0]

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.file is None else self.file.entries[self.name][1]

    def tensor(self) -> np.ndarray:
        """A read-only view."""
        return self.file.tensor(self.name)

    def read_into(self, out: np.ndarray) -> None:
        self.file.read_into(self.name, out)


def named_tensors(
    folder: Path,
    config: ModelConfig,
    files: Mapping[str, SafetensorsFile | None] | None = None,
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Every tensor of a folder that the model may need, and what is set aside.

    Args:
      files: name -> file that holds it, as of `open_folder`, which None calls.
    Returns:
      published name -> tensor; name, as in the files, -> why the model needs it not.
    Raises:
      CheckpointError: a damaged folder, a tensor under two names, or rotary
        frequencies that are not those of the config.
    """
    found: dict[str, Stored] = {}
    published_name = rules.publisher(config)
    for name, file in (open_folder(folder) if files is None else files).items():
        published = published_name(name)
        if published in found:
            raise CheckpointError(
                f"{folder} has {found[published].name} and {name}, two names of one "
                "tensor; remove the one that is out of date"
            )
        found[published] = Stored(file, name)
    if config.tie_embeddings and EMBED not in found and HEAD in found:
        found[EMBED] = found.pop(HEAD)  # one tensor under the other's name
    later, left_out = _later_layers(found, config), rules.family(config).left_out
    # Most names of a large model are of experts: nothing of those is set aside.
    may_go = (*left_out, *(f"model.layers.{layer}." for layer in later))
    reasons = {
        name: reason
        for name in found
        if (".experts." not in name or name.startswith(may_go) or "mtp" in name)
        and (reason := _why_unused(name, found, config, later)) is not None
    }
    return found, {found.pop(name).name: reason for name, reason in reasons.items()}


def _why_unused(
    name: str, found: dict[str, Stored], config: ModelConfig, later: set[int]
) -> str | None:
    """Why nothing that the model computes needs a tensor; None: something may."""
    if name.startswith(rules.family(config).left_out):
        return "of another modality than text"
    if name.endswith(_FREQUENCIES):
        stored = found[name]
        if stored.file is not None:
            check_frequencies(stored.file.path, stored.name, stored.tensor(), config)
        return "rotary frequencies, computed from config.json"
    match = _LAYER_ID.match(name)
    if _LATER_TOKENS.match(name) or (match and int(match[1]) in later):
        return "of a module that predicts later tokens"
    if match and _is_of_empty_expert(name, int(match[1]), found, config):
        return "of a shared expert without neurons"
    return None


def _later_layers(found: Iterable[str], config: ModelConfig) -> set[int]:
    """Layers behind the last one that are modules predicting later tokens.

    config.json may say how many there are. Any other layer behind the last one means
    that the files and their config do not belong together.
    """
    joining = {
        int(match[1])
        for name in found
        if _JOINS in name and (match := _LAYER_ID.match(name))
    }
    counts = [config.hf_config.get(name) for name in _LATER_LAYERS]
    stated = next((n for n in counts if type(n) is int and n > 0), len(joining))
    first = config.num_layers
    return {layer for layer in joining if first <= layer < first + stated}


def _is_of_empty_expert(
    name: str, layer: int, found: dict[str, Stored], config: ModelConfig
) -> bool:
    """Whether a tensor belongs to a shared expert that has no neurons."""
    if config.moe.shared_dim or "shared_expert" not in name:
        return False
    names = rules.shared_names(config, layer)
    if name == names["shared_gate"]:  # multiplies what such an expert gives: zeros
        name = names["shared.up"]
    return name in names.values() and name in found and 0 in found[name].shape


def check_frequencies(
    path: Path, name: str, values: np.ndarray, config: ModelConfig
) -> None:
    """Refuses rotary frequencies in a file that are not those of the config.

    They may be those before scaling: so some writers stored them.

    Args:
      path: the file, for the message.
    """
    if values.dtype in (*WEIGHT_DTYPES.values(), np.dtype(np.float64)):
        limits = ml_dtypes.finfo(values.dtype)
        plain = [dataclasses.replace(rope, kind="default") for rope in config.ropes]
        for wanted in map(inverse_frequencies, (*config.ropes, *plain)):
            if values.shape == wanted.shape and np.allclose(
                values.astype(np.float64),
                wanted,
                rtol=max(2 * float(limits.eps), 1e-5),
                atol=float(limits.smallest_subnormal),
            ):
                return
    stated = [f"rope {rope.kind}, theta {rope.theta}" for rope in config.ropes]
    stated = " or ".join(stated) or "no rope"
    raise CheckpointError(
        f"{path}: {name} differs from the frequencies that its config states ({stated}"
        "); correct the config, or remove the tensor if the config is right"
    )
