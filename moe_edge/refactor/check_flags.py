"""Which flags of launch/refactor.py go together, and what fine-tuning needs.

Checked before anything is solved: a partition takes long, and training comes after it.
"""

from collections.abc import Mapping
from typing import Any

from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CapacityError, ConfigError, build_known
from moe_edge.evaluate.texts import find_path
from moe_edge.model.config import ModelConfig
from moe_edge.refactor.finetune.data import read_windows
from moe_edge.refactor.finetune.settings import FineTuning
from moe_edge.refactor.finetune.step import check_trainable

# One matrix is partitioned by these alone.
MATRIX_FLAGS = (
    *("activations", "sub_experts", "inactive", "solver", "restarts", "normalise"),
    *("heldout_ratio", "data_dir", "seed", "overwrite", "dry_run", "config_text"),
)
# Gate -> flags that mean nothing with another one.
GATE_FLAGS = {
    "cg": ("gate_neurons", "proxy_rule", "gate_choice"),
    "lg_ft": ("train_text", "fine_tuning", "max_minutes"),
}


def check_mode(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Checks that what was given is of one mode and one gate.

    Args:
      given: flag -> value.
      defaults: flag -> default; a flag that has it cannot be told from one left out.
    Raises:
      ConfigError: a flag that would be ignored, or one that is missing.
    """
    changed = [name for name, default in defaults.items() if given[name] != default]
    gate = given["gate"]
    if given["activations"] is not None:
        extra = [name for name in changed if name not in MATRIX_FLAGS]
        if extra:
            raise ConfigError(
                f"--{extra[0]} means nothing beside --activations, which partitions "
                "one matrix; leave one of them out"
            )
        return
    needed = ["checkpoint", "profile"] + ["train_text"] * (gate == "lg_ft")
    missing = [f"--{name}" for name in needed if not given[name]]
    if missing:
        raise ConfigError(
            f"no {', '.join(missing)}; a model with --gate {gate} needs "
            f"{', '.join('--' + name for name in needed)}, one matrix --activations"
        )
    for wanted, names in GATE_FLAGS.items():
        extra = [name for name in changed if name in names and gate != wanted]
        if extra:
            raise ConfigError(f"--{extra[0]} is for --gate {wanted}, got --gate {gate}")


def find_texts(paths: str, data_dir: str | None) -> list[str]:
    """Files of a list separated by commas.

    Raises:
      ConfigError: it names none.
    """
    found = [find_path(p.strip(), data_dir) for p in paths.split(",") if p.strip()]
    if not found:
        raise ConfigError(
            f"train_text is {paths!r}, expected files separated by commas"
        )
    return found


def check_fine_tuning(
    reader,
    child: ModelConfig,
    texts: list[str],
    options: Mapping[str, Any] | None,
    seed: int,
) -> dict[str, Any]:
    """Checks what `finetune_router` will be given once the model is split.

    Args:
      reader: the parent.
      child: config of the refactored model.
      texts: files to train on.
      options: of `FineTuning`.
      seed: unless the options have one.
    Returns:
      the options.
    Raises:
      ConfigError: options that are unknown or bad, or a gate without rows to train;
      CapacityError: a window beyond the context; RequestError: too little text.
    """
    if not isinstance(options, Mapping | None):
        raise ConfigError(
            f"fine_tuning is {options!r}, expected options by name, such as "
            "{'tokens': 100000}"
        )
    options = {"seed": seed} | dict(options or {})
    settings = build_known(
        "settings", {"fine_tuning": FineTuning}, "fine_tuning", options
    )
    check_trainable(child)
    settings.stages(child)
    if settings.window > child.max_positions:
        raise CapacityError(
            f"window of {settings.window} tokens exceeds the model's context of "
            f"{child.max_positions}"
        )
    read_windows(
        load_tokenizer(reader),
        ",".join(texts),
        None,
        window=settings.window,
        held_out_rows=settings.held_out_rows,
    )
    return options
