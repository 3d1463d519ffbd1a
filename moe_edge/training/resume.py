"""What must agree before a run goes on in a folder: its model and its corpus.

Nothing here writes, so that a refused resume leaves the folder as it was.
"""

from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.core.json_reader import read_json
from moe_edge.model.config import ModelConfig

CHECKPOINTS_FOLDER = "checkpoints"
CORPUS_FILE = "corpus.npz"
FACTS_FILE = "corpus.json"  # what the corpus was built with
SETTINGS_FILE = "settings.json"  # what a run was last called with
GONE = ("evenness",)  # settings of runs of before, which no run goes on with


def saved_config(run_dir: Path) -> ModelConfig | None:
    """The architecture of a run's newest checkpoint, or None if it has none."""
    folder = run_dir / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return None
    from moe_edge.training import checkpoints  # here: it loads JAX

    with checkpoints.open_checkpoints(folder) as manager:
        about = checkpoints.read_about(manager)
    return None if about is None else checkpoints.config_from_json(about["config"])


def corpus_facts(
    data_dir: Path, vocab_size: int, task_characters: int, seed: int
) -> dict[str, Any]:
    """What a corpus depends on; without a data folder, `data_dir` is None."""
    return {
        "data_dir": str(data_dir.resolve()) if data_dir.is_dir() else None,
        "vocab_size": vocab_size,
        "task_characters": task_characters,
        "seed": seed,
    }


def _stored(path: Path) -> dict[str, Any] | None:
    """What a run wrote about itself, or None if that cannot be read."""
    try:
        stored = read_json(path, strict=False)
    except ConfigError:
        return None
    return stored if isinstance(stored, dict) else None


def differences(wanted: dict[str, Any], stored: dict[str, Any], prefix="") -> str:
    """What is wanted otherwise than it is stored, in words; empty if nothing is."""
    return "; ".join(
        f"{prefix}{name} is {value!r}, it was {stored.get(name)!r}"
        for name, value in wanted.items()
        if stored.get(name) != value
    )


def check_corpus(run_dir: Path, facts: dict[str, Any]) -> None:
    """Raises ConfigError if `run_dir` has a corpus that was built with other facts."""
    path = run_dir / CORPUS_FILE
    if not path.is_file():
        return
    stored = _stored(run_dir / FACTS_FILE)
    if stored is None:
        raise ConfigError(
            f"{run_dir / FACTS_FILE} does not say what {path.name} was built with; "
            f"delete {path} and it is built again"
        )
    if differing := differences(facts, stored, "--"):
        raise ConfigError(
            f"{path} was built with other settings: {differing}; name them again or "
            "another --out_dir"
        )


def check_resume(
    run_dir: Path,
    config: ModelConfig,
    facts: dict[str, Any],
    training: dict[str, Any],
) -> None:
    """Checks that a run of `config` on the corpus of `facts` may use `run_dir`.

    Args:
      training: settings that a run keeps from its start to its end: a model card
        reports them for the whole run.
    Raises:
      ConfigError: a checkpoint of another architecture, another corpus, or other
        settings.
      OutputError: `run_dir` is a file.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise OutputError(f"output folder {run_dir} is a file; name another --out_dir")
    check_corpus(run_dir, facts)
    saved = saved_config(run_dir)
    if saved is None:
        return
    if saved != config:
        raise ConfigError(
            f"checkpoint in {run_dir} is of another architecture than asked for; name "
            "another --out_dir or the same model flags"
        )
    stored = _stored(run_dir / SETTINGS_FILE) or {}
    if gone := [name for name in GONE if stored.get(name)]:
        raise ConfigError(
            f"the run in {run_dir} was trained with {gone[0]} {stored[gone[0]]}, which "
            "is no longer there; name another --out_dir"
        )
    if differing := differences(training, stored):
        raise ConfigError(
            f"the run in {run_dir} was trained with other settings: {differing}; "
            "name them again or another --out_dir"
        )
