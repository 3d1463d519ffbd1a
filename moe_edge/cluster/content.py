"""What a checkpoint holds: a SHA-256 for each of its files.

Copies of one checkpoint have the same hashes on every machine, and so have two
conversions of one model: of a folder of ours, dense weights are hashed by value
(Orbax's files differ from write to write), of the manifest only what it says of the
model, and of the expert files the records (what follows them depends on the format's
version). Hashing reads everything once, so hashes are kept in the user's cache folder,
by path, size and time of change; a checkpoint itself may be read-only.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.dense import item_path
from moe_edge.checkpoint.experts_file import experts_path
from moe_edge.checkpoint.manifest import HF_FOLDER, MANIFEST_NAME
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.json_reader import read_json
from moe_edge.core.progress import counter, say
from moe_edge.model.quantised import as_stored

CACHE = "MOE_EDGE_CACHE"  # environment: another folder
GGUF = "GGUF file"  # the same under any name
_PIECE_BYTES = 4 << 20
_MB = 1_000_000
# A file may change twice within one tick of its file system's clock.
_SETTLED_S = 2.0
_MODEL_KEYS = "model_type", "hf_config", "dtype", "L", "E", "U", "record"
_GATE_KEYS = "gate", "gate_neurons", "rank_shares"


class Part(NamedTuple):
    """What is hashed together.

    Attributes:
      name: of the file, in messages.
      files: whose sizes and times tell whether it has changed.
      pieces: what is hashed, made as it is asked for.
    """

    name: str
    files: list[Path]
    pieces: Callable[[], Iterator[bytes | memoryview]]


def content_of(reader) -> dict[str, str]:
    """Name of each file of an open checkpoint -> SHA-256 of its content.

    Raises:
      CheckpointError: a file cannot be read.
    """
    parts, stored = _parts(reader), _stored_file(reader.path)
    known = _read_stored(stored)
    states = {part.name: _state(part) for part in parts}
    hashes = {
        name: known[name]["sha256"]
        for name, state in states.items()
        if name in known and known[name]["state"] == state
    }
    missing = [part for part in parts if part.name not in hashes]
    total = sum(size for part in missing for _, size, _ in states[part.name])
    try:
        with counter(f"hashing {reader.path} (MB)", total // _MB + 1) as count:
            done = _Done(count)
            for part in missing:
                hashes[part.name] = _hash(part, done)
    finally:  # also of a run that ends meanwhile
        if missing:
            files = {
                name: {"state": states[name], "sha256": hashes[name]}
                for name in hashes
                if _has_settled(states[name])
            }
            _store(stored, {"checkpoint": str(reader.path), "files": files})
    return {part.name: hashes[part.name] for part in parts}


def check_same(who: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raises ConfigError unless two checkpoints hold the same, naming a file.

    Args:
      who: whose `theirs` is; `ours` is the scheduler's.
    """
    for name in sorted(theirs.keys() | ours.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine == other:
            continue
        if mine is None or other is None:
            has = who if mine is None else "the scheduler"
            lacks = "the scheduler" if mine is None else who
            what = f"the --checkpoint of {has} has {name}, that of {lacks} has not"
        else:
            what = (
                f"{who} has another {name} in its --checkpoint than the scheduler "
                f"(SHA-256 {other[:12]}, there {mine[:12]})"
            )
        raise ConfigError(f"{what}; give all processes the same checkpoint")


def _parts(reader) -> list[Part]:
    """All that a checkpoint's tokens depend on."""
    path = reader.path
    if isinstance(reader, GgufReader):
        return [_of_file(GGUF, path)]
    if not isinstance(reader, CheckpointReader):
        files = [*sorted(path.glob("*.json")), *reader.weight_files]
        return [_of_file(file.name, file) for file in files]
    manifest = path / MANIFEST_NAME
    parts = [Part(MANIFEST_NAME, [manifest], lambda: _of_manifest(reader.manifest))]
    for file in sorted((path / HF_FOLDER).glob("*.json")):
        parts.append(_of_file(f"{HF_FOLDER}/{file.name}", file))
    for item in dense_items(reader.config):
        folder = item_path(path, item)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        name = str(folder.relative_to(path))
        parts.append(Part(name, files, lambda item=item: _of_dense(reader, item)))
    records = reader.config.moe.num_experts * reader.manifest["record"]["bytes"]
    for layer in reader.config.moe_layers:
        file = experts_path(path, layer)
        parts.append(_of_file(str(file.relative_to(path)), file, records))
    return parts


def _of_file(name: str, path: Path, num_bytes: float = math.inf) -> Part:
    """A file, or its first bytes."""

    def pieces():
        left = num_bytes
        with path.open("rb", buffering=0) as file:
            while piece := file.read(min(_PIECE_BYTES, left)):
                left -= len(piece)
                yield piece

    return Part(name, [path], pieces)


def _of_manifest(manifest: dict) -> Iterator[bytes]:
    """What it says of the model, not of where that came from."""
    refactor = manifest.get("refactor")
    facts = {key: manifest[key] for key in _MODEL_KEYS}
    if refactor is not None:
        facts["refactor"] = {key: refactor.get(key) for key in _GATE_KEYS}
    yield json.dumps(facts, sort_keys=True).encode()


def _of_dense(reader: CheckpointReader, item) -> Iterator[bytes | memoryview]:
    """Names, dtypes, shapes and values of a dense item."""
    for name, weight in sorted(reader.dense(item).items()):
        array = as_stored(weight)
        yield f"{name} {array.dtype.name} {array.shape}\n".encode()
        yield memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


class _Done:
    """Counts bytes as whole megabytes."""

    def __init__(self, count: Callable[[int], None]):
        self._count, self._bytes = count, 0

    def add(self, num_bytes: int) -> None:
        before = self._bytes // _MB
        self._bytes += num_bytes
        self._count(self._bytes // _MB - before)


def _hash(part: Part, done: _Done) -> str:
    digest = hashlib.sha256()
    try:
        for piece in part.pieces():
            digest.update(piece)
            done.add(len(piece))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename or part.name}: {error.strerror}"
        ) from error
    return digest.hexdigest()


def _state(part: Part) -> list[list]:
    """Path, size and time of change of each of its files."""
    found = []
    for file in part.files:
        try:
            facts = file.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        found.append([str(file), facts.st_size, facts.st_mtime_ns])
    return found


def _has_settled(state: list[list]) -> bool:
    last_ns = time.time_ns() - int(_SETTLED_S * 1e9)
    return all(changed_ns < last_ns for _, _, changed_ns in state)


def _stored_file(checkpoint: Path) -> Path | None:
    """Where the hashes of a checkpoint are kept; None: this user has no folder."""
    given = os.environ.get(CACHE)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home
        base = None
    if not given and base is None:
        return None
    folder = Path(given) if given else Path(base) / "moe_edge"
    name = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:32]
    return folder / "checkpoints" / f"{name}.json"


def _read_stored(path: Path | None) -> dict[str, dict]:
    """What was kept; nothing where it cannot be read."""
    if path is None or not path.is_file():
        return {}
    try:
        files = read_json(path, CheckpointError)["files"]
        return {
            name: {"state": kept["state"], "sha256": str(kept["sha256"])}
            for name, kept in files.items()
        }
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return {}


def _store(path: Path | None, value: dict) -> None:
    """Keeps hashes; where that fails they are computed again the next time."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Supervisors of one machine may hash the same checkpoint at once.
        partial = path.with_name(f".{path.stem}.{os.getpid()}")
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        say(
            f"the checkpoint's hashes cannot be kept in {path.parent} "
            f"({error.strerror}) and will be computed again; {CACHE} names another "
            "folder"
        )
