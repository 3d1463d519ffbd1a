"""Which source it is, without reading all its weights."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from moe_edge.checkpoint.reader import CheckpointReader

_END_BYTES = 1 << 20  # that are read of either end of a weight file
_OF_MANIFEST = "content_sha256", "dtype", "E", "U", "refactor", "pruned", "checksums"


def quick_digest(reader) -> str:
    """Of a folder of ours the hash that conversion stored and what its manifest says of
    the records; of other formats all JSON files, and of each weight file its size and
    both ends."""
    digest = hashlib.sha256()
    if isinstance(reader, CheckpointReader):
        facts = {key: reader.manifest.get(key) for key in _OF_MANIFEST}
        digest.update(json.dumps(facts, sort_keys=True).encode())
        return digest.hexdigest()[:16]
    is_folder = Path(reader.path).is_dir()
    for file in _files(reader):
        size = file.stat().st_size
        digest.update(f"{file.name if is_folder else ''} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_END_BYTES))
            opened.seek(max(size - _END_BYTES, 0))
            digest.update(opened.read(_END_BYTES))
    return digest.hexdigest()[:16]


def source_facts(reader) -> str:
    """`quick_digest`, and when its files were changed last."""
    if isinstance(reader, CheckpointReader):
        return quick_digest(reader)
    changed = [file.stat().st_mtime_ns for file in _files(reader)]
    times = hashlib.sha256(repr(changed).encode()).hexdigest()
    return f"{quick_digest(reader)}-{times[:16]}"


def _files(reader) -> Iterable[Path]:
    path = Path(reader.path)
    if path.is_dir():
        return [*sorted(path.glob("*.json")), *reader.weight_files]
    first = path.name.partition("-00001-of-")[0]  # GGUF; a model in parts is several
    parts = path.parent.glob(f"{first}-*-of-*.gguf")
    return sorted({path, *(part.resolve() for part in parts)})
