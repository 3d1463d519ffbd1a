"""Training checkpoints: Orbax, atomic, the newest two kept."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_edge.checkpoint.dense import orbax_writes
from moe_edge.model.attention_config import (
    AttentionConfig,
    IndexerConfig,
    RopeConfig,
)
from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.training.options import Hyper
from moe_edge.training.start import init_params
from moe_edge.training.step import TrainState, make_optimizer

KEEP = 2


@dataclasses.dataclass
class Progress:
    """Where a run stands; with the state it determines the rest of the run.

    Attributes:
      step: optimiser steps taken.
      tokens: tokens trained on.
      position: of the data, chunks or rows drawn (`data.Source`).
      seconds: time spent training, pauses left out.
    """

    step: int = 0
    tokens: int = 0
    position: int = 0
    seconds: float = 0.0


def config_to_json(config: ModelConfig) -> dict:
    """A config as plain JSON values (without `hf_config`)."""
    fields = dataclasses.asdict(config)
    del fields["hf_config"]
    return fields


def config_from_json(fields: dict) -> ModelConfig:
    """The inverse of `config_to_json`."""
    fields = dict(fields)
    others = map(_attention_from_json, fields.pop("other_attention", ()))
    for name in ("dense_layers", "eos_ids", "attention_kinds"):
        fields[name] = tuple(fields.get(name, ()))
    if indexer := fields.get("indexer"):
        layers = tuple(indexer["layers"])
        fields["indexer"] = IndexerConfig(**indexer | {"layers": layers})
    moe = dict(fields.pop("moe"))
    moe["rank_shares"] = tuple(tuple(row) for row in moe.get("rank_shares", ()))
    return ModelConfig(
        attention=_attention_from_json(fields.pop("attention")),
        other_attention=tuple(others),
        moe=MoeConfig(**moe),
        **fields,
    )


def _attention_from_json(fields: dict) -> AttentionConfig:
    rope = fields["rope"]
    if rope is not None:
        rope = RopeConfig(**rope | {"factors": tuple(rope.get("factors", ()))})
    windows = tuple(fields["windows"])
    return AttentionConfig(**{**fields, "rope": rope, "windows": windows})


def open_checkpoints(folder: Path):
    """A context that yields an Orbax manager for `folder` and closes it."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP, create=True, enable_async_checkpointing=False
    )
    return contextlib.closing(ocp.CheckpointManager(folder.absolute(), options=options))


def save(manager, state: TrainState, progress: Progress, config: ModelConfig) -> None:
    """Writes a checkpoint under its step; an existing one of that step stays."""
    about = {"progress": dataclasses.asdict(progress), "config": config_to_json(config)}
    save_state(manager, progress.step, state, about)


def restore(manager, hyper: Hyper) -> tuple[TrainState, Progress, ModelConfig] | None:
    """The newest checkpoint, or None if there is none."""
    about = read_about(manager)
    if about is None:
        return None
    config = config_from_json(about["config"])
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    optimizer = jax.eval_shape(make_optimizer(hyper).init, shapes)
    state = restore_state(manager, TrainState(shapes, optimizer))
    return state, Progress(**about["progress"]), config


def _tree(state: TrainState) -> dict[str, dict[str, Any]]:
    """Plain containers, as Orbax wants them: optax's tuples become numbered leaves."""
    leaves = jax.tree.leaves(state.optimizer)
    numbered = {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}
    return {"params": state.params, "optimizer": numbered}


def save_state(manager, step: int, state: TrainState, about: dict[str, Any]) -> None:
    """Writes a state and what is said about it; an existing one of `step` stays."""
    if step in manager.all_steps():
        return
    tree = _tree(state)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    with orbax_writes(manager.directory, num_bytes):
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree), about=ocp.args.JsonSave(about)
            ),
        )
        manager.wait_until_finished()


def read_about(manager) -> dict[str, Any] | None:
    """What the newest checkpoint says about itself, or None if there is none."""
    step = manager.latest_step()
    if step is None:
        return None
    args = ocp.args.Composite(about=ocp.args.JsonRestore())
    return manager.restore(step, args=args)["about"]


def restore_state(manager, shapes: TrainState) -> TrainState:
    """The newest state; `shapes` has its structure, shapes and dtypes."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        _tree(shapes),
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
    tree = manager.restore(manager.latest_step(), args=args)["state"]
    leaves = [tree["optimizer"][name] for name in wanted["optimizer"]]
    treedef = jax.tree.structure(shapes.optimizer)
    return TrainState(tree["params"], jax.tree.unflatten(treedef, leaves))
