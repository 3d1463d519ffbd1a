"""From a profile to sub-experts: partitions, their order, gate neurons."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.convert.refactored_router import Judges, LevelRows
from moe_edge.convert.refactored_writer import Refactoring, read_records
from moe_edge.core.progress import progress
from moe_edge.papers.moe_prism.refactor.gates.calibrated import fit_rows, flat_rows
from moe_edge.papers.moe_prism.refactor.gates.linear import order_subs, sub_norms
from moe_edge.papers.moe_prism.refactor.gates.proxy import (
    RankShares,
    choose_judges,
    stack_judges,
)
from moe_edge.papers.moe_prism.refactor.partition.model import (
    ModelPartition,
    partition_model,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import split_rows
from moe_edge.papers.moe_prism.refactor.settings import Settings
from moe_edge.profile.reader import Profile


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
    child = settings.split(reader.config)
    if settings.gate == "cg":
        r = child.moe.gate_neurons
        settings = dataclasses.replace(settings, gate_neurons=r)
    down = {layer: down_norms(reader, layer) for layer in profile.layers}
    partition = partition_model(
        profile,
        work_dir,
        settings,
        neuron_weights=down if settings.weigh_neurons else None,
        fingerprint=f"{profile.content_sha256} {profile.info}",
    )
    shares = RankShares(reader.config.moe.top_k, settings.sub_experts)
    labels, judges, rows = {}, {}, {}
    for row, layer in enumerate(progress(profile.layers, "gates")):
        found = [
            _finish(profile, layer, e, labels_F, down[layer][e], settings, shares)
            for e, labels_F in enumerate(partition.labels_LEF[row])
        ]
        labels[layer] = np.stack([each.labels_F for each in found])
        if settings.gate == "cg":
            judges[layer] = _stack(found, settings)
        if settings.model_gate == "calibrated":
            prior_U = _prior(found, settings.sub_experts)
            flat = flat_rows(prior_U, reader.config.d_model)
            rows[layer] = [each.rows or flat for each in found]
    if settings.model_gate == "proxy_pattern":
        moe = dataclasses.replace(child.moe, rank_shares=shares.table())
        child = dataclasses.replace(child, moe=moe)
    refactoring = Refactoring(
        config=child,
        labels=labels,
        judges=judges,
        rows=rows,
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
    norms = []
    for _, records in read_records(reader, layer):
        down_EDF = reader.layout.part(records, "down").astype(np.float32)
        norms.append(np.linalg.norm(down_EDF, axis=1))
    return np.concatenate(norms)


class _Found(NamedTuple):
    """What became of one expert; only the labels where tokens were too few."""

    labels_F: np.ndarray
    judges: Judges | None = None
    rows: LevelRows | None = None
    level_U: np.ndarray | None = None  # mean level of its sub-experts


def _finish(
    profile: Profile, layer: int, expert: int, labels_F, down_F, settings, shares
) -> _Found:
    """Orders an expert's sub-experts, and finds what tells them apart at run time."""
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
    if settings.gate in ("lg", "lg_ft"):
        return _Found(labels_F)
    norms_TU = sub_norms(fit_TF, labels_F, U, down_F)
    if settings.model_gate == "calibrated":
        rows = fit_rows(profile.hidden(layer, expert)[fit], norms_TU)
        return _Found(labels_F, rows=rows, level_U=norms_TU.mean(axis=0))
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
    return _Found(labels_F, judges, level_U=levels_TU.mean(axis=0))


def _stack(found: list[_Found], settings: Settings) -> Judges:
    """A layer's gate neurons; experts of few tokens get the mean level as a prior.

    Levels, since what gate neurons say of a norm has the norm's unit only if fitted.
    """
    U, r = settings.sub_experts, settings.gate_neurons
    prior_U = _prior(found, U)
    members = [np.argsort(e.labels_F, kind="stable").reshape(U, -1) for e in found]
    return stack_judges(
        [
            each.judges or Judges(ids_UF[:, :r], np.zeros((U, r), np.float32), prior_U)
            for each, ids_UF in zip(found, members, strict=True)
        ]
    )


def _prior(found: list[_Found], subs: int) -> np.ndarray:
    """Mean level of each block, over the experts that have one; [U]."""
    known = [each.level_U for each in found if each.level_U is not None]
    return np.mean(known, axis=0) if known else np.zeros(subs)
