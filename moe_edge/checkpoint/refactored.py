"""The `refactor` object of a manifest: how a model was split into sub-experts.

{"gate": one of `model.config.GATES`, "gate_neurons": r, "rank_shares": [[..]], and
where it came from: inactive, solver, seed, parent_sha256, profile, fine_tuned}.
`hf_config`, `E` and the like stay the parent's; only `U` and the records tell of the
split.
"""

from pathlib import Path
from typing import Any

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import split_config


def config_of_manifest(
    folder: Path, manifest: dict[str, Any], parent: ModelConfig
) -> ModelConfig:
    """The model that a checkpoint holds: the parent, or the parent split.

    Raises:
      CheckpointError: sub-experts without `refactor`, or one that does not fit.
    """
    refactor, subs = manifest.get("refactor"), manifest["U"]
    if refactor is None and subs == 1:
        return parent
    if not isinstance(refactor, dict):
        raise CheckpointError(
            f"{folder}: U is {subs}, but the manifest has no `refactor` that says how "
            "sub-experts are chosen; refactor the model again (launch/refactor.py)"
        )
    shares = refactor.get("rank_shares") or ()
    try:
        return split_config(
            parent,
            subs,
            gate=refactor.get("gate", "linear"),
            gate_neurons=refactor.get("gate_neurons", 0),
            rank_shares=tuple(tuple(float(x) for x in row) for row in shares),
        )
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: refactor of the manifest: {error}") from error
