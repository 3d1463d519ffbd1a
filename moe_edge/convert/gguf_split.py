"""Opens a GGUF file, or the parts of a model that was cut into several.

Parts are named `NAME-00001-of-00003.gguf`. The first has all metadata; the keys
`split.no`, `split.count` and `split.tensors.count` tell whether they belong together.
Source: tools/gguf-split of github.com/ggml-org/llama.cpp.
"""

import re
from pathlib import Path

from moe_edge.convert.gguf_file import GgufFile
from moe_edge.core.checks import CheckpointError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 99_999


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file; of a model in parts all tensors, if `path` is the first of them.

    Raises:
      CheckpointError: a file that is damaged, or parts that do not belong together.
    """
    file = GgufFile(path)
    count = file.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise CheckpointError(
            f"{path} is damaged: split.count is {count!r:.60}, expected 0 to "
            f"{_MAX_PARTS}; copy it again"
        )
    if count < 2:
        return file
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, expected a name that ends in "
            f"-00001-of-{count:05d}.gguf; give the parts the names they had"
        )
    parts = [
        path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    if path.name != parts[0].name:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; name the first, {parts[0]}"
        )
    for part in parts[1:]:
        file.add(GgufFile(part))
    for number, own in enumerate(file.parts):
        stated = own.metadata.get("split.no"), own.metadata.get("split.count")
        if stated != (number, count):
            raise CheckpointError(
                f"{own.path} says it is part {stated[0]!r:.20} of {stated[1]!r:.20} "
                f"counted from 0, expected {number} of {count}; copy it again"
            )
    total = file.metadata.get("split.tensors.count")
    if total != len(file.tensors):
        raise CheckpointError(
            f"{path} and its parts have {len(file.tensors)} tensors, expected "
            f"{total!r:.20} (split.tensors.count); copy the parts of one model again"
        )
    return file
