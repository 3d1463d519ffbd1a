"""Recall of shadows over recorded runs: each prompt is generated once by the model.

A decoder's keys and values of a position never change afterwards. So a shadow can be
aligned with the caches of the finished run, and every precision and pair of periods
follows the same tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.bench.cases import workload_of
from moe_edge.bench.engines import Bench
from moe_edge.bench.prompts import make_pool
from moe_edge.core.checks import ConfigError
from moe_edge.engine.base import Engine
from moe_edge.metrics.frames import Estimate, interval
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine
from moe_edge.papers.od_moe.shadow.follower import Course, Follower, read_choices
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.shadow.recall import count_correct, recall, recall_by_index
from moe_edge.papers.od_moe.studies.shadows import shadow_in
from moe_edge.papers.od_moe.studies.studies import BARS, RecallSettings

RESAMPLES = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A finished greedy generation.

    Attributes:
      tokens: what each decode step ran, int32 `[1]` on the device.
      chosen_NLK: experts of each decode step; -1 in dense layers.
      caches: of all layers.
    """

    prompt: Sequence[int]
    tokens: Sequence[jax.Array]
    chosen_NLK: np.ndarray
    caches: list
    capacity: int


def record(engine: Engine, prompt: Sequence[int], new_tokens: int) -> Recorded:
    """Generates up to an end-of-text token; that one is not run.

    Raises:
      ConfigError: layers with states, of which the last alone is there to align with.
    """
    config, tokens, chosen = engine.config, [], []
    if config.has_states:
        raise ConfigError(
            f"layers of {config.model_type} keep states, and a recorded run has only "
            "its last ones to align a shadow with; expected attention in every layer"
        )
    session = engine.new_session(1, len(prompt) + new_tokens)
    logits_BV, active_B = engine.prefill(session, [prompt]), jnp.ones(1, bool)
    for _ in range(new_tokens - 1):
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        if int(token_B[0]) in config.eos_ids:
            break
        found: list[jax.Array | None] = [None] * config.num_layers

        def note(layer, routing, found=found):
            found[layer] = routing.ids_TK

        logits_BV = engine.decode(session, token_B, active_B, note)
        tokens.append(token_B)
        chosen.append(read_choices(found, 1, config.moe.top_k)[:, 0])
    shape = len(chosen), config.num_layers, config.moe.top_k
    chosen_NLK = np.asarray(chosen, np.int32).reshape(shape)
    return Recorded(prompt, tokens, chosen_NLK, session.caches, session.capacity)


def follow(run: Recorded, shadow: ShadowEngine, periods: Shadow) -> np.ndarray:
    """What the shadow predicts for every decode step, as `Recorded.chosen_NLK`."""
    course = Course(Follower(shadow, 1, run.capacity), periods)
    course.begin([run.prompt])
    active_B, K = jnp.ones(1, bool), run.chosen_NLK.shape[-1]
    predicted = [
        read_choices(course.step(run.caches, token_B, active_B), 1, K)[:, 0]
        for token_B in run.tokens
    ]
    return np.asarray(predicted, np.int32).reshape(run.chosen_NLK.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Recall:
    """Predictions of all runs, judged; one list entry a run."""

    chosen: Sequence[np.ndarray]
    predicted: Sequence[np.ndarray]

    @property
    def overall(self) -> float:
        """Eq. 3."""
        return recall(np.concatenate(self.chosen), np.concatenate(self.predicted))

    @property
    def by_index(self) -> np.ndarray:
        """Eq. 2; entry 0 is the first decode step's."""
        index_N = np.concatenate([1 + np.arange(len(run)) for run in self.chosen])
        both = np.concatenate(self.chosen), np.concatenate(self.predicted)
        return recall_by_index(index_N, *both)

    @property
    def last(self) -> float:
        """Over the last eighth of the indexes."""
        first = len(self.by_index) * 7 // 8
        both = (
            [run[first:] for run in self.chosen],
            [run[first:] for run in self.predicted],
        )
        return recall(*map(np.concatenate, both))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `overall`, from resampled prompts."""
        pairs = list(zip(self.chosen, self.predicted, strict=True))
        correct_Q = np.array([count_correct(*pair).sum() for pair in pairs])
        chosen_Q = np.array([(chosen >= 0).sum() for chosen, _ in pairs])
        drawn_RQ = np.random.default_rng(0).integers(
            0, len(pairs), (RESAMPLES, len(pairs))
        )
        found_R = correct_Q[drawn_RQ].sum(axis=1) / chosen_Q[drawn_RQ].sum(axis=1)
        low, high = np.quantile(found_R, (0.025, 0.975))
        return float(low), float(high)

    @property
    def estimate(self) -> Estimate:
        """`overall` with its interval; n counts decode steps."""
        steps = sum(len(run) for run in self.chosen)
        return interval(self.overall, self.interval, steps)


class Runs:
    """The recorded runs of a study, and shadows of their model.

    Attributes:
      config: of the model.
      model, workload: of a results entry.
    """

    def __init__(self, settings: RecallSettings):
        self._bench = Bench(settings.checkpoint)
        self.config = self._bench.config
        resident, tokenizer = self._bench.resident, self._bench.tokenizer
        pool = make_pool(settings, tokenizer, settings.rounds, settings.prompt_tokens)
        self.runs = [
            record(resident, prompt, settings.new_tokens) for prompt in pool.rows
        ]
        self.model = self._bench.model
        self.workload = workload_of(settings, pool)
        self.workload["decode_steps"] = sum(len(run.tokens) for run in self.runs)

    def recall(self, periods: Shadow) -> Recall:
        """All runs, followed by a shadow with these options."""
        shadow = shadow_in(self._bench, periods.precision)
        predicted = [follow(run, shadow, periods) for run in self.runs]
        return Recall([run.chosen_NLK for run in self.runs], predicted)


def bar_checks(found: Mapping[str, float]) -> dict[str, bool]:
    """Recall by precision, aligned at every step, against our bars."""
    return {
        f"{name}, T1_KV1: recall >= {bar}": found[name] >= bar
        for name, bar in BARS.items()
        if name in found
    }
