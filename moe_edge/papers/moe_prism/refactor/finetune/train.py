"""Fine-tunes the rows that choose: MoE-Prism, section 4.3.2, for a linear gate.

Cross-entropy of the whole model, everything but the router frozen, and K, the number
of (sub-)experts a token computes, growing linearly from `k_start` to `k_end`. K moves
in a few stages, since every K is a program of its own. Ours, where asked for: each step
draws its K, and the model follows itself as it was at its own K; and the rows of a
calibrated gate, which choose among the blocks of experts that the router chose.
"""

import copy
import dataclasses
import hashlib
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.checkpoint.checksums import KEY, item_crc32
from moe_edge.checkpoint.dense import DenseWriter, item_path
from moe_edge.checkpoint.manifest import MANIFEST_NAME
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert.hf_files import dump_json
from moe_edge.convert.stream import content_sha256
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import say
from moe_edge.engine.weights import load_weights
from moe_edge.model.sub_experts import at_k
from moe_edge.papers.moe_prism.refactor.finetune import step as programs
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from moe_edge.papers.moe_prism.refactor.texts import Windows
from moe_edge.training import checkpoints
from moe_edge.training.control import Clock, StopOnSignal, append_record, short
from moe_edge.training.resume import differences
from moe_edge.training.step import TrainState

LOG_MINUTES, CHECKPOINT_MINUTES = 0.25, 5.0
STATES, RECORDS = "checkpoints", "metrics.jsonl"


def finetune_router(
    reader,
    settings: FineTuning,
    text: Windows,
    out_dir: Path,
    max_minutes: float | None = None,
) -> dict[str, Any]:
    """Trains the router's rows of a refactored model, stores them in it and moves it.

    While it runs, its state is in `<out_dir>.training`, from which a second call with
    the same arguments goes on exactly; the folder disappears with the last step.

    Args:
      reader: of our format; its gate is linear or calibrated, its folder becomes
        `out_dir`.
      max_minutes: stop after so many minutes, to go on another time.
    Returns:
      finished, step, steps, tokens, seconds, trained_parameters, parameters,
      trained_share, k_values, text_sha256, held_out_before (perplexity by K); once
      finished also held_out_after, of the rows as they are stored.
    Raises:
      ConfigError: a state of other settings, or a loss that is not finite.
    """
    keep_heap()
    state_dir = out_dir.with_name(f"{out_dir.name}.training")
    run = Training(reader, settings, text, state_dir)
    stages = run.stages
    trained, total = programs.parameter_counts(reader.config)
    say(f"trains {trained} of {total} parameters ({trained / total:.3%}), K {stages}")
    facts = dataclasses.asdict(settings) | {
        "model_sha256": reader.content_sha256(),
        "text_sha256": text.sha256,
        "held_out_sha256": hashlib.sha256(text.held_out.tobytes()).hexdigest(),
    }
    done = run.train(facts, max_minutes)
    summary = {
        "finished": done,
        "step": run.progress.step,
        "steps": settings.steps,
        "tokens": run.progress.tokens,
        "seconds": run.progress.seconds,
        "trained_parameters": trained,
        "parameters": total,
        "trained_share": trained / total,
        "k_values": stages,
        "text_sha256": text.sha256,
        "held_out_before": run.before,
    }
    if not done:
        return summary
    stored = stored_router(reader, run.state.params)
    after = run.held_out({name: a.astype(np.float32) for name, a in stored.items()})
    say(f"held-out perplexity by K after: {short(after)}")
    fine_tuned = {
        "tokens": run.progress.tokens,
        "steps": run.progress.step,
        "learning_rate": settings.learning_rate,
        "teacher_kl": settings.teacher_kl,
        "k_order": settings.k_order,
        "k_start": stages[0],
        "k_end": stages[-1],
        "text_sha256": text.sha256,
    }
    store_router(reader, stored, fine_tuned)
    shutil.rmtree(out_dir, ignore_errors=True)  # of a run that was killed here
    reader.path.rename(out_dir)
    shutil.rmtree(state_dir)
    return summary | {"held_out_after": after}


def stored_router(reader, router: programs.RouterWeights) -> dict[str, np.ndarray]:
    """The rows in the dtypes that the checkpoint stores them in."""
    arrays = {}
    for path, array in router.items():
        _, layer, name = path.split(".", 2)
        dtype = reader.dense_dtypes(int(layer))[name]
        arrays[path] = np.asarray(array).astype(dtype)
    return arrays


def store_router(reader, stored: dict[str, np.ndarray], fine_tuned: dict) -> None:
    """Replaces a checkpoint's rows, and in its manifest what follows from them."""
    dense, sums = DenseWriter(reader.path), copy.deepcopy(reader.checksums)
    for layer in reader.config.moe_layers:
        arrays = reader.dense(layer)
        paths = {name: f"blocks.{layer}.{name}" for name in arrays}
        new = {name: stored[path] for name, path in paths.items() if path in stored}
        shutil.rmtree(item_path(reader.path, layer))
        dense.save(layer, arrays | new)
        if sums is not None:
            sums.dense[layer] = item_crc32(arrays | new)
    refactor = reader.manifest["refactor"] | {"fine_tuned": fine_tuned}
    manifest = reader.manifest | {"refactor": refactor}
    if sums is not None:
        manifest |= {KEY: sums.as_json()}
    changed = CheckpointReader(reader.path, manifest, reader.parent_config)
    manifest |= {"content_sha256": content_sha256(changed)}
    dump_json(reader.path / MANIFEST_NAME, manifest)


def keep_records(path: Path, steps: int) -> None:
    """Drops the records after `steps`: those steps run again. A step writes a line."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(lines[:steps]))


class Training:
    """One training, whose state is in `state_dir`: checkpoints/ and metrics.jsonl.

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
        weight = settings.teacher_kl
        self._gradients = {
            k: programs.make_gradient_step(c, config, weight)
            for k, c in configs.items()
        }
        # A copy: the rows that are trained are given away to each update.
        self._teacher = jax.tree.map(jnp.copy, router) if weight else None
        self.state = TrainState(router, optimizer.init(router))
        self.progress = checkpoints.Progress()
        self.before: dict[int, float] = {}

    def num_compiled(self) -> int:
        """Programs compiled so far."""
        steps = [*self._eval_steps.values(), *self._gradients.values(), self._update]
        return sum(step._cache_size() for step in steps)

    def held_out(self, router: programs.RouterWeights) -> dict[int, float]:
        """Held-out perplexity by K."""
        rows_NS, router = self._text.held_out, jax.device_put(router)
        batch = min(self._settings.rows, len(rows_NS))
        whole_NS = rows_NS[: len(rows_NS) // batch * batch]
        batches = np.split(whole_NS, len(whole_NS) // batch)
        tokens = whole_NS[:, 1:].size
        found = {}
        for k, step in self._eval_steps.items():
            nats = sum(float(step(router, self._frozen, rows)) for rows in batches)
            found[k] = float(np.exp(nats / tokens))
        return found

    def train(self, facts: dict[str, Any], max_minutes: float | None) -> bool:
        """Runs to the end, the time limit or a signal; returns whether it is the end.

        Args:
          facts: what a state must agree with to be taken up.
          max_minutes: None: no limit.
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
                if clock.due("checkpoint", CHECKPOINT_MINUTES):
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
        # A run of an older version does not name options that came later.
        before = dataclasses.asdict(FineTuning()) | about["facts"]
        if differing := differences(facts, before):
            raise ConfigError(
                f"{self._dir} holds a run of other settings: {differing}; "
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
            total = self._gradients[k](
                total, self.state.params, self._frozen, rows, self._teacher
            )
        rate = settings.rate(progress.step)
        self.state, loss, apart, norm = self._update(
            self.state, total, np.float32(settings.step_tokens), rate
        )
        for name, value in (("loss", loss), ("gradient's norm", norm)):
            if not np.isfinite(float(value)):
                raise ConfigError(
                    f"the {name} is {float(value)} at step {progress.step}; lower the "
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
            **({"teacher_kl": float(apart)} if settings.teacher_kl else {}),
            "grad_norm": float(norm),
            "learning_rate": float(rate),
            "tokens_per_s": round(settings.step_tokens / seconds, 1),
        }
