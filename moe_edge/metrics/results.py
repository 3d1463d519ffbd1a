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
from moe_edge.core.out_folder import write_folder
from moe_edge.metrics.machine import REPOSITORY, git_state, machine_info
from moe_edge.metrics.report import entry_page
from moe_edge.metrics.schema import SCHEMA, SCHEMA_VERSION, validate_entry

Draw = Callable[[Path], None]  # draws a picture into the given file


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


def interval_metric(
    policy: str, name: str, value: float, interval: Sequence[float], n: int
) -> dict[str, Any]:
    """A plain ratio with its 95 % interval, of which half is shown."""
    low, high = interval
    return metric(
        policy, name, value, "1", n, ("half of the 95 % interval", (high - low) / 2)
    )


def command_line() -> str:
    """How this process was started; our own scripts relative to the repository."""
    arguments = [part.removeprefix(f"{REPOSITORY}/") for part in sys.orig_argv[1:]]
    if arguments and Path(arguments[0]).name == "moe-edge":
        return shlex.join(["moe-edge", *arguments[1:]])
    return shlex.join(["python", *arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a measurement gives; the writer adds machine, source state and time.

    Attributes:
      answer: one sentence of at most 40 words (`schema.check_answer`); `details`:
        further ones, shown below it.
      model: {name, params, weights}; workload: what was run, with sources and sha256.
      metrics: rows made by `metric`.
      limits: what the numbers do not show.
      ours: our numbers, next to those of the paper's claim.
      plot: draws `plot.png`; `pictures`: further ones by file name.
      files: further text files of the entry by name.
      summary: further keys of the script's last line.
    """

    answer: str
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    limits: Sequence[str]
    plot: Draw
    details: Sequence[str] = ()
    kind: str = "measured"
    cost_model_source: str = "measured on this machine"
    seeds: Sequence[int] = (0,)
    baselines: Sequence[str] = ()
    checks: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    ours: Mapping[str, Any] | None = None
    pictures: Mapping[str, Draw] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    found: Findings,
    *,
    question: str,
    config_text: str,
    paper_claim: Mapping[str, Any] | None = None,
    started_s: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes an entry and returns its folder.

    Args:
      out_dir: the entry's folder.
      found: what was found.
      question: what the run asks.
      config_text: the gin config of the run.
      paper_claim: what it is compared with.
      started_s: by `time.time`; None: now.
      overwrite: replace a non-empty folder.
    Raises:
      OutputError: the folder is not empty or cannot be written.
      ConfigError: an entry that does not fit the schema.
    """
    now_s = time.time()
    started_s = now_s if started_s is None else started_s
    values = {
        "schema_version": SCHEMA_VERSION,
        "question": question,
        "command": command_line(),
        "git": git_state(),
        "config_sha256": hashlib.sha256(config_text.encode("utf-8")).hexdigest(),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s)),
        "wall_s": round(now_s - started_s, 3),
        "machine": machine_info(),
        "paper_claim": paper_claim,
    }
    result = {
        key: values[key] if key in values else kind(getattr(found, key))
        for key, kind in SCHEMA.items()
    }

    def save(folder: Path) -> None:
        (folder / "config.gin").write_bytes(config_text.encode("utf-8"))
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        for name, text in found.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, draw in ({"plot.png": found.plot} | dict(found.pictures)).items():
            draw(folder / name)
        (folder / "README.md").write_text(entry_page(folder, result), encoding="utf-8")
        validate_entry(folder)

    write_folder(out_dir, save, overwrite)
    return Path(out_dir)
