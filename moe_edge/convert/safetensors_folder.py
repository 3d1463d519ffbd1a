"""The shards of a Hugging Face folder: one file, or several with an index."""

from pathlib import Path

from moe_edge.checkpoint.schema import name_some
from moe_edge.convert.hf_config import read_json
from moe_edge.convert.safetensors_reader import MAX_HEADER_BYTES, SafetensorsFile
from moe_edge.core.checks import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """Opens every shard of an HF folder: tensor name -> file that holds it.

    Raises:
      CheckpointError: no weights, a shard missing or damaged, an index that
        disagrees with the shards, a tensor in two shards.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    # The order of transformers: a single file wins over an index.
    if single.is_file():
        names, weight_map = [SINGLE_NAME], None
    elif index.is_file():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
    else:
        weight_map = None
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{folder} has no .safetensors file (other weight formats, such as pickled "
            ".bin files, are never read)"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {name_some(missing)}, named by {INDEX_NAME}"
        )
    found: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile(folder / name)
        twice = sorted(set(found) & set(file.entries))
        if twice:
            raise CheckpointError(
                f"{folder}: {name_some(twice)} stand both in "
                f"{found[twice[0]].path.name} and in {name}"
            )
        found.update(dict.fromkeys(file.entries, file))
    if weight_map is not None:
        wrong = [
            name
            for name in sorted(set(found) | set(weight_map))
            if name not in found or found[name].path.name != weight_map.get(name)
        ]
        if wrong:
            raise CheckpointError(
                f"{index.name} and the shards of {folder} disagree on "
                f"{name_some(wrong)}"
            )
    return found


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index, with file names that stay inside the folder."""
    index = read_json(path, MAX_HEADER_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; expected tensor -> file name")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: tensor {name} is in {file!r}, expected the plain name of a "
                ".safetensors file next to the index"
            )
    return weight_map
