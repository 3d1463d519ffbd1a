"""What must agree between the processes of a run, and who differs in what.

JAX does not compare their programs: with different ones, one process returned a number
and the other hung.
"""

import functools
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moe_edge.convert.digest import quick_digest
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.process import processor
from moe_edge.hosts.frames import read_json
from moe_edge.hosts.link import Link

Facts = dict[str, str]

PACKAGE = Path(__file__).resolve().parents[1]
# They choose what is computed, or how.
VARIABLES = (
    *("MOE_EDGE_DECODE_ATTENTION", "MOE_EDGE_DELTA_STATE", "MOE_EDGE_PACKED"),
    *("MOE_EDGE_FEW_ROWS", "MOE_EDGE_FILLED_ATTENTION", "MOE_EDGE_KERNELS"),
    *("MOE_EDGE_PARTS", "XLA_FLAGS"),
)
_SHOWN = 60  # characters of a value in a message
_REMEDIES = {
    "flag": "give all processes the same flags",
    "checkpoint": "give all processes the same checkpoint",
    "devices": "all hosts of a run need the same devices",
    "environment": "set it alike everywhere",
    "version": "install the same version everywhere",
}


def program_facts(arguments: Mapping[str, Any], own: Collection[str]) -> Facts:
    """What this process was started with.

    Args:
      arguments: of the command; `checkpoint` is compared by what it holds, other files
        that are there by their content.
      own: names of arguments that each process has for itself.
    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    import jax
    import jaxlib

    from moe_edge.kernels import native

    facts = {
        "version of moe_edge": source_digest(),
        "version of jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        "version of the kernels": native.identity(),
    }
    if "checkpoint" in arguments:
        facts["checkpoint"] = checkpoint_digest(str(arguments["checkpoint"]))
    for name in VARIABLES:
        facts[f"environment {name}"] = os.environ.get(name, "not set")
    folder = arguments.get("data_dir") or ""
    for name, value in arguments.items():
        if name not in own and name != "checkpoint":
            facts[f"flag --{name}"] = _shown_argument(value, folder)
    return facts


def device_facts() -> Facts:
    """The devices of this process; starts JAX."""
    import jax

    kinds = [device.device_kind for device in jax.local_devices()]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    found = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    if jax.default_backend() == "cpu":  # unlike ones may round differently
        found = f"{found} ({processor()})"
    return {"devices": found}


def compare(link: Link, facts: Facts) -> None:
    """Refuses processes that differ; all of them call it, and all of them refuse.

    Raises:
      ConfigError: names the first fact in which one differs from process 0.
    """
    if link.index:
        link.send(json.dumps(facts).encode())
        line = read_json(link.receive())
    else:
        others = link.gather()
        found = (
            difference(number, read_json(payload), facts)
            for number, payload in others.items()
        )
        line = next(filter(None, found), None)
        link.broadcast(json.dumps(line).encode())
    if line is not None:
        raise ConfigError(line)


def difference(number: int, theirs: Facts, ours: Facts) -> str | None:
    """In what process `number` differs from process 0, with what to do; None: nothing.

    Args:
      ours: of process 0.
    """
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine, other = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if mine != other:
            kind = name.partition(" ")[0]
            return (
                f"process {number} differs from process 0 in {name}: {_cut(other)}, "
                f"there {_cut(mine)}; {_REMEDIES[kind]}"
            )
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _shown_argument(value: Any, folder: str) -> str:
    """A value as it is compared: a file by its content, whatever its path.

    Args:
      folder: in which relative paths are looked up, too.
    """
    if isinstance(value, str) and value:
        parts = [_file_digest(part, folder) or part for part in value.split(",")]
        return ",".join(parts)
    if isinstance(value, (list, tuple)):
        return repr([_shown_argument(each, folder) for each in value])
    return repr(value)


def _file_digest(path: str, folder: str) -> str | None:
    """Of a file that is there, else None."""
    for place in (path, os.path.join(folder, path)):
        try:
            with open(place, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return f"a file of sha256 {digest}"
        except (OSError, ValueError):
            continue
    return None


@functools.cache
def source_digest() -> str:
    """Of all sources of this package: two clones of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def checkpoint_digest(checkpoint: str) -> str:
    """Of what a checkpoint holds, without reading all its weights."""
    return quick_digest(open_checkpoint(checkpoint))
