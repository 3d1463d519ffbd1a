"""The only writer of results entries.

An entry is a folder: `result.json` (see `schema.py`), `README.md`, `plot.png` and
`config.gin`. It is built under a temporary name, so none is ever half-written.
"""

import dataclasses
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import atomic_folder
from moe_edge.metrics.machine import REPOSITORY, git_state, machine_info
from moe_edge.metrics.report import entry_readme
from moe_edge.metrics.schema import SCHEMA_VERSION, validate_entry


def metric(
    policy: str,
    name: str,
    value: float,
    unit: str,
    n: int = 1,
    spread: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """One row of `metrics`.

    Args:
      policy: what was run.
      name: what was measured.
      value: the number.
      unit: its unit, "1" for a plain ratio.
      n: how many observations stand behind it.
      spread: its kind (such as "std") and value.
    """
    kind, width = spread or ("none", 0.0)
    value = {"policy": policy, "name": name, "value": float(value), "unit": unit}
    return value | {"n": int(n), "spread": {"kind": kind, "value": float(width)}}


def command_line() -> str:
    """How this process was started; our own scripts relative to the repository."""
    arguments = [part.removeprefix(f"{REPOSITORY}/") for part in sys.orig_argv[1:]]
    return shlex.join(["python", *arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What a run found; machine, source state and time are added when written.

    Attributes:
      question: what the run asks; `answer`: one sentence of at most 40 words;
        `details`: further ones.
      model: {name, params, weights}; workload: what was run, with sources and sha256.
      metrics: rows made by `metric`.
      limits: what the numbers do not show.
      command: how to run it again.
    """

    question: str
    answer: str
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    limits: Sequence[str]
    kind: str = "measured"
    cost_model_source: str = "measured on this machine"
    details: Sequence[str] = ()
    seeds: Sequence[int] = (0,)
    baselines: Sequence[str] = ()
    checks: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    paper_claim: Mapping[str, Any] | None = None
    command: str = dataclasses.field(default_factory=command_line)
    started_s: float = dataclasses.field(default_factory=time.time)


def check_clean(out_dir: str | Path, allow_dirty: bool = False) -> None:
    """Refuses to write a committed entry from sources that no commit holds.

    Raises:
      ConfigError: `out_dir` is under the repository's results/ (not results/local),
        and files differ from the commit.
    """
    results, out_dir = REPOSITORY / "results", Path(out_dir).resolve()
    local = out_dir.is_relative_to(results / "local")
    if allow_dirty or local or not out_dir.is_relative_to(results):
        return
    if git_state()["dirty"]:
        raise ConfigError(
            f"output folder {out_dir} is one of committed results, but files differ "
            "from the commit: commit first, name another --out_dir, or add "
            "--allow_dirty"
        )


def write_entry(
    out_dir: str | Path,
    entry: Entry,
    *,
    plot: Callable[[Path], None],
    config_text: str,
    overwrite: bool = False,
    files: Mapping[str, str] | None = None,
    pictures: Mapping[str, Callable[[Path], None]] | None = None,
) -> Path:
    """Writes an entry and returns its folder.

    Args:
      out_dir: the entry's folder.
      entry: what was found.
      plot: draws the picture into the given file.
      config_text: the gin config of the run.
      overwrite: replace a non-empty folder.
      files: further text files by name.
      pictures: further pictures by name: each draws into the given file.
    Raises:
      OutputError: the folder is not empty or cannot be written.
      ConfigError: an entry that does not fit the schema.
    """
    started = time.gmtime(entry.started_s)
    result = {
        "schema_version": SCHEMA_VERSION,
        "question": entry.question,
        "answer": entry.answer,
        "details": list(entry.details),
        "command": entry.command,
        "git": git_state(),
        "config_sha256": hashlib.sha256(config_text.encode("utf-8")).hexdigest(),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", started),
        "wall_s": round(time.time() - entry.started_s, 3),
        "seeds": list(entry.seeds),
        "kind": entry.kind,
        "cost_model_source": entry.cost_model_source,
        "machine": machine_info(),
        "model": dict(entry.model),
        "workload": dict(entry.workload),
        "metrics": [dict(row) for row in entry.metrics],
        "baselines": list(entry.baselines),
        "checks": dict(entry.checks),
        "paper_claim": entry.paper_claim,
        "limits": list(entry.limits),
    }
    with atomic_folder(out_dir, overwrite) as folder:
        (folder / "config.gin").write_bytes(config_text.encode("utf-8"))
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "README.md").write_text(entry_readme(result), encoding="utf-8")
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        plot(folder / "plot.png")
        for name, draw in (pictures or {}).items():
            draw(folder / name)
        validate_entry(folder)
    return Path(out_dir)
