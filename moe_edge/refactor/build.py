"""From a profile to sub-experts: settings, partitions, their order, gate neurons."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.convert.content_hash import chunk_rows
from moe_edge.core.checks import check_count, check_known
from moe_edge.core.progress import progress
from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.sub_experts import split_config
from moe_edge.profile.reader import Profile
from moe_edge.refactor.gates.linear import RULES, order_subs, sub_norms
from moe_edge.refactor.gates.proxy import (
    CHOICES,
    Judges,
    RankShares,
    choose_judges,
    stack_judges,
)
from moe_edge.refactor.partition.model import (
    ModelPartition,
    PartitionOptions,
    partition_model,
)
from moe_edge.refactor.partition.problem import split_rows
from moe_edge.refactor.partition.solve import DEFAULT
from moe_edge.refactor.write import Refactoring, check_records

GATES = {"lg": "linear", "lg_ft": "linear", "cg": "proxy"}
PROXY_RULES = ("global", "pattern")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(PartitionOptions):
    """What `launch/refactor.py` does to a model; defaults are measured ones.

    Attributes (more than those of `PartitionOptions`):
      solver: None: magnitude for lg, which always runs the same blocks of an expert
        first, and alternate where the gate tells blocks apart or `restarts` are given.
      gate: lg, lg_ft (linear gate, fine-tuned) or cg (proxy gate).
      weigh_neurons: by the length of their down columns, before solving.
      importance: how sub-experts are ordered, one of `linear.RULES`.
      proxy_rule: cg: global ranks all blocks of the chosen experts, pattern gives the
        expert of each rank a number of blocks.
      gate_neurons: cg: r of every sub-expert; None: the paper's 4, but at most one in
        sixteen of its neurons, since they are computed for all blocks.
      gate_choice: cg: fitted or central (the paper's).
    """

    gate: str = "lg"
    weigh_neurons: bool = True
    importance: str = "output"
    proxy_rule: str = "global"
    gate_neurons: int | None = None
    gate_choice: str = "fitted"

    def __post_init__(self):
        check_count("sub_experts", self.sub_experts)
        if self.gate_neurons is not None:
            check_count("gate_neurons", self.gate_neurons)
        check_known("gate", self.gate, GATES)
        check_known("importance rule", self.importance, RULES)
        check_known("proxy_rule", self.proxy_rule, PROXY_RULES)
        check_known("gate_choice", self.gate_choice, CHOICES)

    @property
    def chosen_solver(self) -> str:
        fixed = self.gate == "lg" and self.restarts is None
        return self.solver or ("magnitude" if fixed else DEFAULT)

    def num_gate_neurons(self, parent: MoeConfig) -> int:
        """r, or 0 without a proxy gate."""
        if self.gate != "cg":
            return 0
        if self.gate_neurons is not None:
            return self.gate_neurons
        return max(1, min(4, parent.expert_dim // self.sub_experts // 16))

    @property
    def model_gate(self) -> str:
        """One of `model.config.GATES`."""
        kind = GATES[self.gate]
        return kind if kind == "linear" else f"proxy_{self.proxy_rule}"

    def split(self, parent: ModelConfig) -> ModelConfig:
        """The refactored config; refuses what cannot be done before any work.

        Raises:
          ConfigError: a model refactored already, sizes that do not divide, more gate
            neurons than there are, or a linear gate of a model routed by groups.
        """
        zeros = ((0.0,) * self.sub_experts,) * parent.moe.top_k
        child = split_config(
            parent,
            self.sub_experts,
            gate=self.model_gate,
            gate_neurons=self.num_gate_neurons(parent.moe),
            rank_shares=zeros if self.model_gate == "proxy_pattern" else (),
        )
        self.check(parent.moe.expert_dim)
        return child


def build_refactoring(
    reader, profile: Profile, settings: Settings, work_dir: Path
) -> tuple[Refactoring, ModelPartition]:
    """Splits every expert of a model.

    `heldout_ratio` of an expert's rows is left out of everything but the held-out
    objective. An expert with fewer than `min_tokens` of the others keeps the rule of
    `partition.model.partition_expert`, and its blocks are judged by priors alone.

    Args:
      reader: the parent.
      profile: of the same checkpoint.
      settings: already checked against the model.
      work_dir: keeps finished layers of the partition until the caller removes it.
    """
    config, U = reader.config, settings.sub_experts
    if settings.gate == "cg":
        r = settings.num_gate_neurons(config.moe)
        settings = dataclasses.replace(settings, gate_neurons=r)
    row_of = {layer: row for row, layer in enumerate(profile.layers)}
    down = {layer: down_norms(reader, layer) for layer in profile.layers}
    weigh = (
        (lambda layer, expert: down[layer][expert]) if settings.weigh_neurons else None
    )
    partition = partition_model(
        profile,
        work_dir,
        settings,
        neuron_weights=weigh,
        fingerprint=f"{profile.content_sha256} {profile.info}",
    )
    shares = RankShares(config.moe.top_k, U)
    labels, judges = {}, {}
    for layer in progress(config.moe_layers, "gates"):
        labels_EF = partition.labels_LEF[row_of[layer]]
        found = [
            _finish(
                profile, layer, expert, labels_F, down[layer][expert], settings, shares
            )
            for expert, labels_F in enumerate(labels_EF)
        ]
        labels[layer] = np.stack([each.labels_F for each in found])
        if settings.gate == "cg":
            judges[layer] = _stack(found, settings)
    pattern = settings.model_gate == "proxy_pattern"
    refactoring = Refactoring(
        subs=U,
        labels=labels,
        gate=settings.model_gate,
        judges=judges,
        rank_shares=shares.table() if pattern else (),
        origin={
            "inactive": settings.num_inactive,
            "solver": settings.chosen_solver,
            "seed": settings.seed,
            "parent_sha256": profile.content_sha256,
            "profile": str(profile.path),
            "settings": dataclasses.asdict(settings),
        },
    )
    return refactoring, partition


def down_norms(reader, layer: int) -> np.ndarray:
    """Lengths of every neuron's down column, float32 `[E, F]`."""
    E, layout = reader.config.moe.num_experts, reader.layout
    step = chunk_rows(layout, reader.dtype.itemsize, E)
    buffer = np.empty((step, layout.size), reader.dtype)
    norms = []
    for first in range(0, E, step):
        records = buffer[: min(step, E - first)]
        reader.read_experts(layer, first, records)
        check_records(reader, layer, first, records)
        down_EDF = layout.part(records, "down").astype(np.float32)
        norms.append(np.linalg.norm(down_EDF, axis=1))
        reader.release()
    return np.concatenate(norms)


class _Found(NamedTuple):
    """What became of one expert; without judges where tokens were too few."""

    labels_F: np.ndarray
    judges: Judges | None = None
    level_U: np.ndarray | None = None  # mean level of its sub-experts


def _finish(
    profile: Profile, layer: int, expert: int, labels_F, down_F, settings, shares
) -> _Found:
    """Orders an expert's sub-experts and, for cg, chooses its gate neurons."""
    rows_TF = profile.activations(layer, expert)
    kept, U = len(rows_TF), settings.sub_experts
    fit, _ = split_rows(max(kept, 1), settings.heldout_ratio, settings.seed)
    if kept == 0 or len(fit) < settings.min_tokens:
        return _Found(labels_F)
    fit_TF = np.asarray(rows_TF[fit])
    weights_T = profile.gate_weights(layer, expert)[fit]
    labels_F = order_subs(
        labels_F,
        fit_TF,
        U,
        down_norms_F=down_F,
        token_weights_T=weights_T,
        rule=settings.importance,
    )
    if settings.gate != "cg":
        return _Found(labels_F)
    norms_TU = sub_norms(fit_TF, labels_F, U, down_F)
    judges = choose_judges(
        fit_TF, norms_TU, labels_F, settings.gate_neurons, settings.gate_choice
    )
    levels_TU = judges.levels(fit_TF)
    shares.add(
        profile.ranks(layer, expert)[fit],
        weights_T,
        levels_TU,
        norms_TU,
        profile.tokens_of(layer, expert) / kept,
    )
    return _Found(labels_F, judges, levels_TU.mean(axis=0))


def _stack(found: list[_Found], settings: Settings) -> Judges:
    """A layer's gate neurons; experts of few tokens get the mean level as a prior.

    Levels, since what gate neurons say of a norm has the norm's unit only if fitted.
    """
    U, r = settings.sub_experts, settings.gate_neurons
    known = [each.level_U for each in found if each.judges is not None]
    prior_U = np.mean(known, axis=0) if known else np.zeros(U)
    members = [
        np.argsort(each.labels_F, kind="stable").reshape(U, -1) for each in found
    ]
    return stack_judges(
        [
            each.judges or Judges(ids_UF[:, :r], np.zeros((U, r), np.float32), prior_U)
            for each, ids_UF in zip(found, members, strict=True)
        ]
    )
