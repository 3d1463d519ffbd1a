"""Held-out loss and expert usage of every domain, with all and with fewer experts."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import at_k
from moe_edge.training.data import CHUNK, Corpus, held_out_rows
from moe_edge.training.start import Params
from moe_edge.training.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Result of one evaluation.

    Attributes:
      loss: domain -> nats per token.
      counts: domain -> int64 [B, L, E], choices of each held-out row.
    """

    loss: dict[str, float]
    counts: dict[str, np.ndarray]

    @property
    def mean_loss(self) -> float:
        return float(np.mean(list(self.loss.values())))


def evaluate_held_out(
    eval_step: Callable, params, corpus: Corpus, *, rows: int = 16, length: int = CHUNK
) -> HeldOut:
    """Scores `rows` held-out rows of `length` tokens of every domain."""
    loss, counts = {}, {}
    for domain in corpus.domains:
        batch = held_out_rows(corpus.held_out[domain], rows, length)
        nats_B, counts_BLE = eval_step(params, batch)
        loss[domain] = float(np.asarray(nats_B).sum() / (rows * length))
        counts[domain] = np.asarray(counts_BLE, np.int64)
    return HeldOut(loss, counts)


def round_to_bfloat16(params: Params) -> Params:
    """The weights as they are shipped, widened to float32 again."""
    return {
        name: np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, array in params.items()
    }


def assess(
    params: Params, config: ModelConfig, corpus: Corpus, rows: int = 16
) -> tuple[HeldOut, HeldOut]:
    """Held-out results of the shipped weights: (all chosen experts, half of them)."""
    params = round_to_bfloat16(params)
    half = at_k(config, max(1, config.moe.top_k // 2))
    full, halved = (
        evaluate_held_out(make_eval_step(c), params, corpus, rows=rows)
        for c in (config, half)
    )
    return full, halved


def text_counts(held_out: HeldOut) -> np.ndarray:
    """Choices in the first and in the second half of every domain: [N, 2, L, E]."""
    parts = []
    for counts_BLE in held_out.counts.values():
        half = counts_BLE.shape[0] // 2
        first, second = counts_BLE[:half], counts_BLE[half : 2 * half]
        parts.append(np.stack([first.sum(axis=0), second.sum(axis=0)]))
    return np.stack(parts)
