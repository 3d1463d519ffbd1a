"""What a results entry must hold, and the check of it."""

import hashlib
import math
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.json_reader import read_json

SCHEMA_VERSION = 2  # 1 had no `details`
# Frames and numbers; what is said of them stands in a template. 3 had half a width in
# place of an estimate's low and high.
ROWS_VERSION = 4
ANSWER_WORDS = 40
KINDS = ("measured", "emulated", "simulated")
COST_MODELS = ("measured on this machine", "preset")
FILES = ("result.json", "README.md", "plot.png", "config.gin")
# Key of result.json -> type.
SCHEMA = {
    "schema_version": int,
    "question": str,
    "answer": str,
    "details": list,
    "command": str,
    "git": dict,
    "config_sha256": str,
    "started_utc": str,
    "wall_s": float,
    "seeds": list,
    "kind": str,
    "cost_model_source": str,
    "machine": dict,
    "model": dict,
    "workload": dict,
    "metrics": list,
    "baselines": list,
    "checks": dict,
    "paper_claim": type(None),  # what papers say stands in templates
    "limits": list,
}
SAID = {"question", "answer", "details", "metrics", "paper_claim", "limits"}
ROWS_SCHEMA = {"schema_version": int, "study": str} | {
    **{key: kind for key, kind in SCHEMA.items() if key not in SAID},
    **{"numbers": dict, "frames": dict},
}
MACHINE_KEYS = {
    *("cpu", "cores", "ram_bytes", "gpu", "driver", "python", "jax", "jaxlib"),
    *("backend", "host_to_device_bytes_per_s", "disk_bytes_per_s"),
}
METRIC_KEYS = ("policy", "name", "value", "unit", "n", "spread")


def validate_entry(folder: str | Path) -> dict[str, Any]:
    """Checks an entry's files, schema, config hash and README; returns the result.

    Raises:
      ConfigError: says what is wrong, naming the file.
    """
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"results entry {folder} lacks {name}")
    path = folder / "result.json"
    result = read_result(folder)
    config = (folder / "config.gin").read_bytes()
    if hashlib.sha256(config).hexdigest() != result["config_sha256"]:
        raise ConfigError(f"{folder}/config.gin does not have the hash in {path}")
    if result["command"] not in (folder / "README.md").read_text(encoding="utf-8"):
        raise ConfigError(f"{folder}/README.md does not name the command of {path}")
    return result


def read_result(folder: str | Path) -> dict[str, Any]:
    """The entry's result.json.

    Raises:
      ConfigError: it is damaged or does not fit the schema.
    """
    path = Path(folder) / "result.json"
    result = read_json(path, strict=False)
    _check_fields(path, result)
    return result


def check_answer(answer: str) -> None:
    """Raises ConfigError for an answer that is longer than a reader bears."""
    if (count := len(answer.split())) > ANSWER_WORDS:
        raise ConfigError(
            f"the answer has {count} words, expected at most {ANSWER_WORDS}: move the "
            f"rest to `details`: {answer[:60]!r}..."
        )


def _check_fields(path: Path, result: Any) -> None:
    if not isinstance(result, dict):
        raise ConfigError(f"{path} is no JSON object")
    if result.get("schema_version") == 1:
        result = {"details": [], **result, "schema_version": SCHEMA_VERSION}
    version = result.get("schema_version")
    if version not in (SCHEMA_VERSION, ROWS_VERSION):
        raise ConfigError(
            f"{path}: schema_version is {version}, expected {SCHEMA_VERSION} or "
            f"{ROWS_VERSION}; measure it again, or read it by the "
            "release that wrote it"
        )
    schema = ROWS_SCHEMA if version == ROWS_VERSION else SCHEMA
    if version == ROWS_VERSION and "starts" in result:  # measured in starts
        schema = schema | {"starts": dict}
    if set(result) != set(schema):
        got = sorted(set(result) ^ set(schema))
        raise ConfigError(f"{path}: missing or unknown keys {got}")
    for key, kind in schema.items():
        if not isinstance(result[key], kind):
            raise ConfigError(f"{path}: {key} is {result[key]!r}, expected {kind}")
    check_known("results kind", result["kind"], KINDS)
    check_known("cost model source", result["cost_model_source"], COST_MODELS)
    missing = MACHINE_KEYS - set(result["machine"])
    missing |= {"name", "params", "weights"} - set(result["model"])
    missing |= {"commit", "dirty"} - set(result["git"])
    if missing:
        raise ConfigError(f"{path}: machine, model or git lack {sorted(missing)}")
    if version == ROWS_VERSION:
        if not result["frames"]:
            raise ConfigError(f"{path}: an entry needs at least one frame with rows")
        return
    if not result["metrics"] or not result["limits"]:
        raise ConfigError(f"{path}: an entry needs at least one metric and one limit")
    for row in result["metrics"]:
        if tuple(row) != METRIC_KEYS or set(row["spread"]) != {"kind", "value"}:
            raise ConfigError(f"{path}: metric {row} must have keys {METRIC_KEYS}")
        if not math.isfinite(row["value"]):
            raise ConfigError(f"{path}: metric {row['name']} is {row['value']}")
