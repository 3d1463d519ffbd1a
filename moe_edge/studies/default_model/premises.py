"""What the papers' methods assume of a model, measured on one.

Substitution (SMoE) needs chosen experts of unequal weight, and others nearly as good as
the least of them. Fewer experts at a small loss, and sub-experts that a gate tells
apart (MoE-Prism), need experts that matter unequally, and parts of them whose norms
differ from token to token. Placement (Prism) needs texts that use different experts.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.evaluate.usage import usage_distances
from moe_edge.model.config import ModelConfig
from moe_edge.papers.moe_prism.refactor.build import down_norms
from moe_edge.papers.moe_prism.refactor.gates.linear import sub_norms
from moe_edge.papers.moe_prism.refactor.partition.model import partition_model
from moe_edge.papers.moe_prism.refactor.partition.problem import split_rows
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions
from moe_edge.profile.reader import Profile
from moe_edge.route.base import gate_scores
from moe_edge.training.data import CHUNK, Corpus, held_out_rows
from moe_edge.training.evaluation import assess, round_to_bfloat16, text_counts
from moe_edge.training.start import Params
from moe_edge.training.step import forward_fn

HELD_OUT = 0.5  # of an expert's tokens: norms are compared on them
SEED = 0  # of which tokens these are


@dataclasses.dataclass(frozen=True)
class Text:
    """What a model does with held-out text.

    Attributes:
      loss: nats a token, mean over domains.
      half_cost: by which share perplexity rises with half of the chosen experts.
      usage_ratio: distance of expert usage between domains over that within one.
    """

    loss: float
    half_cost: float
    usage_ratio: float


@dataclasses.dataclass(frozen=True)
class Weights:
    """How unequal the chosen experts are; A values of SMoE's margin a.

    Attributes:
      by_rank_K: mean share of a token's weight, best first.
      top_A: share of the chosen that are top-score.
      alternatives_A: experts of a token that may stand in for a low-score one.
      seen_top_A: like `top_A`, but of the first K - 1 ranks against the last one: all
        that a trace of the chosen can show.
    """

    by_rank_K: np.ndarray
    top_A: np.ndarray
    alternatives_A: np.ndarray
    seen_top_A: np.ndarray

    @property
    def fall(self) -> float:
        """Weight of the first rank over that of the last."""
        return float(self.by_rank_K[0] / self.by_rank_K[-1])


@dataclasses.dataclass(frozen=True)
class Halves:
    """Share of the norms of chosen experts that half of their sub-experts have.

    Attributes:
      own: the half that is largest for the token; fixed: the same one for all tokens,
        chosen on others.
      independent: like `own`, if sub-experts' norms did not depend on each other.
    """

    own: float
    fixed: float
    independent: float

    @property
    def gain(self) -> float:
        """What a gate that knows the token can add, as a factor."""
        return self.own / self.fixed


def text_of(params: Params, config: ModelConfig, corpus: Corpus, rows: int) -> Text:
    """Scores held-out text as the shipped weights would, with all and half experts."""
    full, half = assess(params, config, corpus, rows=rows)
    between_L, within_L = usage_distances(text_counts(full))
    return Text(
        full.mean_loss,
        float(np.expm1(half.mean_loss - full.mean_loss)),
        float(between_L.mean() / within_L.mean()),
    )


def held_out_scores(
    params: Params, config: ModelConfig, corpus: Corpus, rows: int
) -> Iterator[np.ndarray]:
    """Gate scores [T, E] of every layer and domain, of `rows` held-out sequences."""
    forward = forward_fn(config)

    @jax.jit
    def scores(params: Params, tokens_BS) -> list[jax.Array]:
        _, routings = forward(params, tokens_BS)
        return [r.scores_TE for r in routings if r is not None]

    params = round_to_bfloat16(params)
    for domain in corpus.domains:
        batch = held_out_rows(corpus.held_out[domain], rows, CHUNK)
        for scores_TE in scores(params, batch[:, :-1]):
            yield gate_scores(np.asarray(scores_TE), config.moe)


def weights_of(
    layers: Iterator[np.ndarray], top_k: int, margins: Sequence[float]
) -> Weights:
    """The mean over layers of scores [T, E], by SMoE's rules (section IV-B)."""
    found = []
    for scores_TE in layers:
        ranked_TE = -np.sort(-scores_TE, axis=1)
        chosen_TK, others_TE = ranked_TE[:, :top_k], ranked_TE[:, top_k:]
        best_T1 = others_TE[:, :1]
        by_rank_K = (chosen_TK / chosen_TK.sum(axis=1, keepdims=True)).mean(axis=0)
        top_A = [(chosen_TK >= (1 + a) * best_T1).mean() for a in margins]
        others_A = [(others_TE > (1 - a) * best_T1).sum(1).mean() for a in margins]
        found.append((by_rank_K, top_A, others_A, seen_top(chosen_TK, margins)))
    return Weights(*(np.mean(part, axis=0) for part in zip(*found, strict=True)))


def seen_top(weights_TK: np.ndarray, margins: Sequence[float]) -> np.ndarray:
    """`Weights.seen_top_A` of weights, best first."""
    last_T1 = weights_TK[:, -1:]
    return np.array([(weights_TK[:, :-1] >= (1 + a) * last_T1).mean() for a in margins])


def halves_of(
    checkpoint: str | Path, profile: Profile, subs: int, work_dir: Path
) -> Halves:
    """Of all experts of a model, each cut into `subs` by its own activations.

    An expert counts by its router weights. The cut and the fixed half are of other
    tokens than those that are measured.

    Args:
      work_dir: keeps the partition's finished layers.
    """
    reader = open_checkpoint(checkpoint)
    down = {layer: down_norms(reader, layer) for layer in profile.layers}
    options = PartitionOptions(sub_experts=subs, heldout_ratio=HELD_OUT, seed=SEED)
    partition = partition_model(profile, work_dir, options, neuron_weights=down)
    sums, rng = np.zeros(4), np.random.default_rng(SEED)
    for row, layer in enumerate(profile.layers):
        for expert in range(profile.num_experts):
            rows_TF = profile.activations(layer, expert)
            if len(rows_TF) < 2:
                continue
            labels_F = partition.labels_LEF[row, expert]
            norms_TU = sub_norms(rows_TF, labels_F, subs, down[layer][expert])
            norms_TU *= profile.gate_weights(layer, expert)[:, None]
            each = profile.tokens_of(layer, expert) / len(rows_TF)
            sums += each * half_sums(norms_TU, rng)
    return Halves(*(sums[:3] / sums[3]))


def half_sums(norms_TU: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sums over held-out tokens of one expert: own half, fixed half, own half if
    sub-experts were independent, all."""
    fit, held = split_rows(len(norms_TU), HELD_OUT, SEED)
    half = norms_TU.shape[1] // 2
    fixed = np.argsort(-norms_TU[fit].sum(axis=0), kind="stable")[:half]
    held_TU = norms_TU[held]

    def own(values_TU: np.ndarray) -> float:
        return -np.sort(-values_TU, axis=1)[:, :half].sum()

    dealt_TU = rng.permuted(held_TU, axis=0)
    return np.array(
        [own(held_TU), held_TU[:, fixed].sum(), own(dealt_TU), held_TU.sum()]
    )
