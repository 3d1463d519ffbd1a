"""The tensors of a Hugging Face folder by their published names.

A file may name them as transformers 5 does in memory, without `model.` in front, or
hold tensors that no model computes with. The latter are set aside, and only if they are
what their names say: rotary frequencies of the config's rope, modules that predict
later tokens, a shared expert without neurons.
"""

import dataclasses
import re
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


class Stored(NamedTuple):
    """A tensor of a file."""

    file: SafetensorsFile
    name: str  # in the file

    @property
    def dtype(self) -> np.dtype:
        return self.file.entries[self.name][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.entries[self.name][1]

    def tensor(self) -> np.ndarray:
        """A read-only view."""
        return self.file.tensor(self.name)

    def read_into(self, out: np.ndarray) -> None:
        self.file.read_into(self.name, out)


def named_tensors(
    folder: Path, config: ModelConfig
) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor of a folder that the model may need, and the others' names.

    Returns:
      published name -> tensor; names, as in the files, of what is set aside.
    Raises:
      CheckpointError: a damaged folder, a tensor under two names, or rotary
        frequencies that are not those of the config.
    """
    found: dict[str, Stored] = {}
    for name, file in open_folder(folder).items():
        published = rules.published_name(config, name)
        if published in found:
            raise CheckpointError(
                f"{folder} has {found[published].name} and {name}, two names of one "
                "tensor; remove the one that is out of date"
            )
        found[published] = Stored(file, name)
    if config.tie_embeddings and EMBED not in found and HEAD in found:
        found[EMBED] = found.pop(HEAD)  # one tensor under the other's name
    unused = [name for name in found if _is_unused(name, found, config)]
    return found, [found.pop(name).name for name in unused]


def _is_unused(name: str, found: dict[str, Stored], config: ModelConfig) -> bool:
    """Whether a tensor belongs to nothing that the model computes."""
    if name.startswith(rules.family(config).left_out):
        return True
    if name.endswith(_FREQUENCIES):
        stored = found[name]
        check_frequencies(stored.file.path, stored.name, stored.tensor(), config)
        return True
    if name.startswith(rules.family(config).mtp_prefixes):
        return True
    match = _LAYER_ID.match(name)
    if match is None:
        return False
    layer = int(match[1])
    if layer < config.num_layers:
        return _is_of_empty_expert(name, layer, found, config)
    # Multi-token prediction modules are stored as layers behind the last one.
    raw = config.hf_config
    counted = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers"))
    usual = rules.family(config).mtp_layers
    return (
        usual > 0
        and layer - config.num_layers < (counted or usual)
        and rules.layer_prefix(layer) + "eh_proj.weight" in found
    )


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
