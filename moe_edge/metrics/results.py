"""The only writer of results entries.

An entry is a folder: `result.json` (see `schema.py`), `README.md`, `plot.png` and
`config.gin`. It is built under a temporary name, so none is ever half-written.
"""

import dataclasses
import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.out_folder import write_folder
from moe_edge.metrics.frames import Rows, Tables, plain, tables
from moe_edge.metrics.machine import REPOSITORY, git_state, machine_info
from moe_edge.metrics.page import render
from moe_edge.metrics.report import entry_page
from moe_edge.metrics.schema import (
    ROWS_SCHEMA,
    ROWS_VERSION,
    SCHEMA,
    SCHEMA_VERSION,
    validate_entry,
)

ROW = "<row>"  # stands for one while a result is written
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


def of_all_starts(command: str, each: Sequence[Mapping[str, Any]]) -> str:
    """The command that takes all starts at once, of one that added the last."""
    count = sum(start["used"] for start in each)
    command = re.sub(r"(--starts)[ =]\d+", rf"\g<1> {count}", command)
    return command.replace("--append", "--overwrite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a measurement gives; the writer adds machine, source state and time.

    Attributes:
      answer: one sentence of at most 40 words (`schema.check_answer`); `details`:
        further ones, shown below it.
      model: {name, params, weights}; workload: what was run, with sources and sha256.
      metrics: rows made by `metric`.
      limits: what the numbers do not show.
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
    started_s: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes an entry and returns its folder.

    Args:
      out_dir: the entry's folder.
      found: what was found.
      question: what the run asks.
      config_text: the gin config of the run.
      started_s: by `time.time`; None: now.
      overwrite: replace a non-empty folder.
    Raises:
      OutputError: the folder is not empty or cannot be written.
      ConfigError: an entry that does not fit the schema.
    """
    values = provenance(config_text, started_s) | {
        "schema_version": SCHEMA_VERSION,
        "question": question,
        "paper_claim": None,
    }
    result = {
        key: values[key] if key in values else kind(getattr(found, key))
        for key, kind in SCHEMA.items()
    }

    def draw(folder: Path) -> None:
        for name, draw in ({"plot.png": found.plot} | dict(found.pictures)).items():
            draw(folder / name)

    _write(out_dir, result, config_text, found.files, draw, overwrite)
    return Path(out_dir)


def write_rows(
    out_dir: str | Path,
    study: str,
    rows: Rows,
    derive: Callable[[Tables], Mapping[str, Any]],
    *,
    starts: Mapping[str, Any] | None = None,
    config_text: str,
    started_s: float,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the entry of a study that measured rows; returns its result.json.

    Args:
      study: its name, by which its page's template is found.
      derive: frames -> numbers by name, of which `checks` are added to those of `rows`.
      starts: of a study measured in starts: `each` of them, and `intervals` of the
        derived numbers.
      out_dir, config_text, started_s, overwrite: as in `write_entry`.
    Raises:
      OutputError: the folder is not empty or cannot be written.
      ConfigError: an entry that does not fit the schema.
    """
    frames = rows.stored()
    numbers = plain(derive(tables(frames)))
    values = DEFAULTS | provenance(config_text, started_s) | rows.about
    values |= {"schema_version": ROWS_VERSION, "study": study, "frames": frames}
    values["checks"] = numbers.pop("checks", {}) | rows.checks
    values["numbers"] = numbers
    result = {key: kind(values[key]) for key, kind in ROWS_SCHEMA.items()}
    if starts is not None:
        result["starts"] = dict(starts)
        result["command"] = of_all_starts(result["command"], starts["each"])

    def draw(folder: Path) -> None:
        render(study, result)[1].draw(folder)

    _write(out_dir, result, config_text, rows.files, draw, overwrite)
    return result


DEFAULTS = {
    "kind": "measured",
    "cost_model_source": "measured on this machine",
    "seeds": [0],
    "baselines": [],
}


def provenance(config_text: str, started_s: float | None) -> dict[str, Any]:
    """How, when and on what an entry was made."""
    now_s = time.time()
    started_s = now_s if started_s is None else started_s
    return {
        "command": command_line(),
        "git": git_state(),
        "config_sha256": hashlib.sha256(config_text.encode("utf-8")).hexdigest(),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s)),
        "wall_s": round(now_s - started_s, 3),
        "machine": machine_info(),
    }


def result_text(result: Mapping[str, Any]) -> str:
    """result.json as it is stored; a row of a frame is a line."""
    frames = result.get("frames", {})
    rows = iter([json.dumps(r) for found in frames.values() for r in found["rows"]])
    marked = {
        name: found | {"rows": [ROW] * len(found["rows"])}
        for name, found in frames.items()
    }
    kept = dict(result) | ({"frames": marked} if frames else {})
    text = json.dumps(kept, indent=1)
    return re.sub(f'"{ROW}"', lambda _: next(rows), text) + "\n"


def _write(
    out_dir: str | Path,
    result: Mapping[str, Any],
    config_text: str,
    files: Mapping[str, str],
    draw: Draw,
    overwrite: bool,
) -> None:
    """Writes an entry's folder, which is whole or not there."""

    def save(folder: Path) -> None:
        (folder / "config.gin").write_bytes(config_text.encode("utf-8"))
        (folder / "result.json").write_text(result_text(result))
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        draw(folder)
        (folder / "README.md").write_text(entry_page(folder, result), encoding="utf-8")
        validate_entry(folder)

    write_folder(out_dir, save, overwrite)
