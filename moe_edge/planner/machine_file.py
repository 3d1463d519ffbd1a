"""machine.json with what models need on the machine: read, checked, written."""

from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.hardware.presets import FORMAT_VERSION, read_machine
from moe_edge.planner.costs import ModelCosts


def stored_costs(path: str, content: str, k: int, batch: int) -> ModelCosts | None:
    """What a machine file says of a checkpoint at one K; None: it says nothing.

    Args:
      content: `content_sha256` of the checkpoint.
    Raises:
      ConfigError: no machine file, or one whose models are other ones.
    """
    models = read_models(path)
    if not models:
        return None
    if content not in models:
        known = ", ".join(each[:12] for each in models)
        raise ConfigError(
            f"machine file {path} was measured with other checkpoints (contents "
            f"{known}), this one has {content[:12]}; leave --machine out to measure, "
            "or give a file without models"
        )
    found = models[content].get(str(k))
    if found is None:
        return None
    costs = ModelCosts.of_json(f"{path}: models.{content[:12]}.{k}", found)
    return costs if costs.batch == batch else None


def read_models(path: str) -> dict[str, Any]:
    """The `models` of a machine file; none in version 1."""
    read_machine(path)  # which refuses what is no machine file
    models = read_json(Path(path), max_bytes=LARGE_FILE_BYTES).get("models", {})
    if not isinstance(models, dict) or not all(
        isinstance(each, dict) for each in models.values()
    ):
        raise ConfigError(f"{path}: models is {models!r:.40}, expected an object")
    return models


def machine_json(path: str | None, entries: dict[str, dict[str, Any]]) -> dict:
    """What is written: the file that was given, or this machine measured, and entries
    of models beside those that it had."""
    if path is not None:
        stored = read_json(Path(path), max_bytes=LARGE_FILE_BYTES)
        models = read_models(path)
    else:
        from moe_edge.hardware.calibrate import calibrate

        measured = calibrate("this_machine", copies=2, most_tokens=16, repeats=1)
        stored, models = measured.to_json(), {}
    models = {**models}
    for content, by_k in entries.items():
        models[content] = models.get(content, {}) | by_k
    return stored | {"format_version": FORMAT_VERSION, "models": models}
