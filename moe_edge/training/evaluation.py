"""Held-out loss, expert usage and right answers, with all and with fewer experts."""

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import at_k
from moe_edge.training.data import CHUNK, Batch, Corpus, held_out_rows
from moe_edge.training.start import Params
from moe_edge.training.step import make_answer_step, make_eval_step


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


def held_out_losses(
    config: ModelConfig, corpus: Corpus, rows: int
) -> Callable[[Params], dict[str, float]]:
    """`evaluate(params)`: nats per token of every domain, of `rows` rows each."""
    step = make_eval_step(config)

    def evaluate(params: Params) -> dict[str, float]:
        return evaluate_held_out(step, params, corpus, rows=rows).loss

    return evaluate


def right_answers(
    config: ModelConfig, asked: Mapping[str, Batch], rows: int = 16
) -> Callable[[Params], dict[str, float]]:
    """`evaluate(params)`: by domain, the share of rows whose answer would be right.

    Of the weights as they are shipped.

    Args:
      asked: as many rows of each domain as `rows`, which run at a time, divides.
    """
    step = make_answer_step(config)

    def evaluate(params: Params) -> dict[str, float]:
        params = round_to_bfloat16(params)
        shares = {}
        for domain, batch in asked.items():
            parts = zip(*(np.split(a, len(a) // rows) for a in batch), strict=True)
            right = [np.asarray(step(params, *part)) for part in parts]
            shares[domain] = float(np.mean(right))
        return shares

    return evaluate


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
