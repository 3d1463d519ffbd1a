"""One fine-tuning run: its settings, its programs, and where it stands."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive
from moe_edge.core.files import write_text
from moe_edge.engine.weights import load_weights
from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import at_k
from moe_edge.refactor.finetune import step as programs
from moe_edge.refactor.finetune.data import Windows
from moe_edge.training import checkpoints
from moe_edge.training.control import Clock, StopOnSignal, append_record, say, short
from moe_edge.training.step import TrainState

LOG_MINUTES = 0.25
STATES, RECORDS = "checkpoints", "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Settings of a run; with model and text they determine its result.

    Attributes:
      tokens: trained on, rounded up to whole steps.
      batch_tokens: of one gradient program: bounds memory.
      accumulate: batches whose gradients make one optimiser step.
      learning_rate: the paper's is 1e-5, for models of billions of parameters.
      k_start, k_end: (sub-)experts a token; None: a quarter of the model's own K, and
        its own K (the paper's 8 and 32 of OLMoE).
      k_stages: how many K are trained, evenly from `k_start` to `k_end`; at most as
        many as there are steps, and a single one is `k_end`.
      window: tokens of a sequence.
      decay: share of the steps at the end over which the learning rate falls to 0.
      held_out_rows: windows on which the loss is reported.
    """

    tokens: int = 2_000_000
    batch_tokens: int = 4096
    accumulate: int = 4
    learning_rate: float = 1e-5
    k_start: int | None = None
    k_end: int | None = None
    k_stages: int = 7
    window: int = 512
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    decay: float = 0.0
    held_out_rows: int = 32
    seed: int = 0

    def __post_init__(self):
        for name in (
            *("tokens", "batch_tokens", "accumulate", "k_stages", "window"),
            "held_out_rows",
        ):
            check_count(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        check_positive("clip_norm", self.clip_norm)
        if not 0 <= self.decay <= 1 or self.weight_decay < 0:
            raise ConfigError(
                f"decay must lie in 0..1 and weight_decay not be negative, got "
                f"{self.decay} and {self.weight_decay}"
            )
        if self.batch_tokens % self.window:
            raise ConfigError(
                f"batch_tokens {self.batch_tokens} must be a multiple of the window of "
                f"{self.window} tokens"
            )

    @property
    def rows(self) -> int:
        """Windows of a batch."""
        return self.batch_tokens // self.window

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimiser step."""
        return self.batch_tokens * self.accumulate

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.step_tokens)

    def rate(self, step: int) -> np.float32:
        """Learning rate of a step."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return np.float32(self.learning_rate * min(1.0, left))

    def stages(self, config: ModelConfig) -> list[int]:
        """The K that are trained, ascending.

        Raises:
          ConfigError: a K that the model does not have, or an end below the start.
        """
        top_k = config.moe.top_k
        start = max(1, top_k // 4) if self.k_start is None else self.k_start
        end = top_k if self.k_end is None else self.k_end
        for k in (start, end):
            at_k(config, k)
        if start > end:
            raise ConfigError(f"k_start {start} exceeds k_end {end}; K grows")
        count = min(self.k_stages, self.steps)  # a stage without a step is not trained
        spread = np.linspace(start, end, count) if count > 1 else [end]
        return sorted({round(float(k)) for k in spread})

    def k_of(self, step: int, stages: list[int]) -> int:
        """K of a step: as many steps for each stage."""
        return stages[step * len(stages) // self.steps]


def forget(state_dir: Path) -> None:
    """Removes what a run left, but not the folder: its lock may be held."""
    shutil.rmtree(state_dir / STATES, ignore_errors=True)
    (state_dir / RECORDS).unlink(missing_ok=True)


def keep_records(path: Path, steps: int) -> None:
    """Drops the records after `steps`: those steps run again. A step writes a line."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(lines[:steps]))


class Run:
    """Trains the router of an open checkpoint.

    Args:
      reader: the checkpoint.
      settings: of the run.
      text: windows to train and to measure on.
      state_dir: receives checkpoints/ and metrics.jsonl.

    Attributes:
      stages: the K that are trained, ascending.
      state: router rows (float32) and optimiser.
      progress: steps, tokens and seconds so far.
      before: held-out perplexity by K of the model as it was.
    """

    def __init__(self, reader, settings: FineTuning, text: Windows, state_dir: Path):
        config = reader.config
        self.stages = settings.stages(config)
        self._settings, self._text, self._dir = settings, text, state_dir
        router, self._frozen = programs.split_weights(load_weights(reader))
        optimizer = programs.make_optimizer(settings.weight_decay, settings.clip_norm)
        self._update = programs.make_update(optimizer)
        configs = {k: at_k(config, k) for k in self.stages}
        # Compiled when they first run, and never again.
        self._eval_steps = {k: programs.make_eval_step(c) for k, c in configs.items()}
        self._gradients = {
            k: programs.make_gradient_step(c) for k, c in configs.items()
        }
        self.state = TrainState(router, optimizer.init(router))
        self.progress = checkpoints.Progress()
        self.before: dict[int, float] = {}

    def num_compiled(self) -> int:
        """Programs compiled so far."""
        steps = [*self._eval_steps.values(), *self._gradients.values(), self._update]
        return sum(step._cache_size() for step in steps)

    def held_out(self, router: programs.Router) -> dict[int, float]:
        """Held-out perplexity by K."""
        rows_NS, router = self._text.held_out, jax.device_put(router)
        batch = min(self._settings.rows, len(rows_NS))
        rows_NS = rows_NS[: len(rows_NS) // batch * batch]
        found = {}
        for k, step in self._eval_steps.items():
            nats = programs.mean_nats(step, router, self._frozen, rows_NS, batch)
            found[k] = float(np.exp(nats))
        return found

    def train(
        self,
        facts: dict[str, Any],
        max_minutes: float | None,
        checkpoint_minutes: float,
    ) -> bool:
        """Runs to the end, the time limit or a signal; returns whether it is the end.

        Args:
          facts: what a state must agree with to be taken up.
          max_minutes: None: no limit.
          checkpoint_minutes: between states that are saved.
        Raises:
          ConfigError: a state of other facts, or a loss that is not finite.
        """
        clock, steps = Clock(max_minutes), self._settings.steps
        with (
            checkpoints.open_checkpoints(self._dir / STATES) as manager,
            StopOnSignal() as signals,
        ):
            self._begin(manager, facts)
            keep_records(self._dir / RECORDS, self.progress.step)

            def save():
                about = {"facts": facts, "before": self.before}
                about["progress"] = dataclasses.asdict(self.progress)
                checkpoints.save_state(manager, self.progress.step, self.state, about)

            while self.progress.step < steps and not signals.stopped:
                if (left := clock.left) is not None and left <= 0:
                    break
                record = self._step()
                append_record(self._dir / RECORDS, record)
                is_last = self.progress.step in (1, steps)
                if clock.due("log", LOG_MINUTES) or is_last:
                    say(short(record))
                if clock.due("checkpoint", checkpoint_minutes):
                    save()
            save()
        return self.progress.step >= steps

    def _begin(self, manager, facts: dict[str, Any]) -> None:
        """Takes up the newest state, or measures the model as it is."""
        about = checkpoints.read_about(manager)
        if about is None:
            self.before = self.held_out(self.state.params)
            say(f"held-out perplexity by K before: {short(self.before)}")
            return
        differing = [
            f"{name} is {value!r}, it was {about['facts'].get(name)!r}"
            for name, value in facts.items()
            if about["facts"].get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"{self._dir} holds a run of other settings: {'; '.join(differing)}; "
                f"name them again, or another out_dir, or remove {self._dir}"
            )
        self.state = checkpoints.restore_state(manager, self.state)
        self.progress = checkpoints.Progress(**about["progress"])
        self.before = {int(k): value for k, value in about["before"].items()}
        say(f"goes on at step {self.progress.step} of {self._settings.steps}")

    def _step(self) -> dict[str, Any]:
        """One optimiser step; returns its record."""
        settings, progress = self._settings, self.progress
        start, k = time.monotonic(), settings.k_of(progress.step, self.stages)
        total = programs.empty_total(self.state.params)
        for nth in range(settings.accumulate):
            rows = self._text.batch(
                progress.step * settings.accumulate + nth, settings.rows, settings.seed
            )
            total = self._gradients[k](total, self.state.params, self._frozen, rows)
        rate = settings.rate(progress.step)
        self.state, loss, norm = self._update(
            self.state, total, np.float32(settings.step_tokens), rate
        )
        if not np.isfinite(float(loss)):
            raise ConfigError(
                f"the loss is {float(loss)} at step {progress.step}; lower the "
                f"learning rate and remove {self._dir}"
            )
        progress.step += 1
        progress.tokens += settings.step_tokens
        seconds = time.monotonic() - start
        progress.seconds += seconds
        return {
            "step": progress.step,
            "k": k,
            "tokens": progress.tokens,
            "loss": float(loss),
            "grad_norm": float(norm),
            "learning_rate": float(rate),
            "tokens_per_s": round(settings.step_tokens / seconds, 1),
        }
