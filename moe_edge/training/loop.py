"""The training loop: resumable, pausable, stopped by tokens, minutes or SIGTERM."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.progress import counter, say, waiting
from moe_edge.model.config import ModelConfig
from moe_edge.training import checkpoints, data
from moe_edge.training.control import Clock, StopOnSignal, append_record, short
from moe_edge.training.options import Hyper, RunOptions
from moe_edge.training.resume import CHECKPOINTS_FOLDER
from moe_edge.training.schedule import Schedule
from moe_edge.training.start import Params
from moe_edge.training.step import TrainState, make_optimizer, make_train_step

METRICS_FILE = "metrics.jsonl"


def _wait_while_paused(options: RunOptions, signals: StopOnSignal) -> float:
    start = time.monotonic()
    if options.pause_file and options.pause_file.exists():
        say(f"paused until {options.pause_file} is removed")
    with waiting():
        while options.pause_file and options.pause_file.exists():
            if signals.stopped:
                break
            time.sleep(0.5)
    return time.monotonic() - start


def train(
    config: ModelConfig,
    source: data.Source,
    out_dir: Path,
    *,
    schedule: Schedule,
    hyper: Hyper,
    options: RunOptions,
    start: Callable[[], Params],
    evaluate: Callable[[Params], dict[str, float]],
) -> checkpoints.Progress:
    """Trains from the newest checkpoint in `out_dir`, or from the start.

    A checkpoint must be of this `config`: `resume.check_resume` says so.
    Writes `checkpoints/` and `metrics.jsonl`.

    Args:
      source: its position moves.
      start: gives the weights that a new run begins with.
      evaluate: what is recorded as `held_out` from time to time, by domain.
    Returns:
      Where the run stopped.
    """
    metrics_path = out_dir / METRICS_FILE
    with (
        checkpoints.open_checkpoints(out_dir / CHECKPOINTS_FOLDER) as manager,
        StopOnSignal() as signals,
    ):
        restored = checkpoints.restore(manager, hyper)
        if restored is None:
            params = start()
            state = TrainState(params, make_optimizer(hyper).init(params))
            progress = checkpoints.Progress()
        else:
            state, progress, _ = restored
        source.skip_to(progress.position)
        step_fn = make_train_step(config, hyper)
        clock, first_step = Clock(options.max_minutes), progress.step

        def record_held_out():
            with counter("held out"):
                held_out = evaluate(state.params)
            record = {"step": progress.step, "tokens": progress.tokens}
            append_record(metrics_path, record | {"held_out": held_out})
            say(f"held out: {short(held_out)}")

        window, window_start, window_tokens = [], time.monotonic(), progress.tokens
        while progress.tokens < schedule.train_tokens and not signals.stopped:
            if clock.left is not None and clock.left <= 0:
                break
            if paused := _wait_while_paused(options, signals):
                window_start += paused
            begun_s = time.monotonic()
            decaying = schedule.left(progress.tokens, clock.left) < 1
            length = options.long_length if decaying else options.length
            batch = source.next_batch(options.batch_tokens // data.CHUNK, length)
            rate = schedule.rate(progress.tokens, clock.left)
            with counter("first step", shown=progress.step == first_step):  # compiles
                given = batch.rows, np.float32(rate), batch.weights
                state, metrics = step_fn(state, *given)
                jax.block_until_ready(metrics)
            window.append(metrics)
            progress.step += 1
            progress.tokens += options.batch_tokens
            progress.position = source.position
            progress.seconds += time.monotonic() - begun_s
            if progress.step % options.log_steps == 0 or progress.step == 1:
                passed = time.monotonic() - window_start
                speed = (progress.tokens - window_tokens) / passed
                record = _summary(window, progress, rate, speed)
                append_record(metrics_path, record)
                say(short(record))
                window, window_tokens = [], progress.tokens
                window_start = time.monotonic()
            if clock.due("checkpoint", options.checkpoint_minutes):
                checkpoints.save(manager, state, progress, config)
            if clock.due("evaluate", options.evaluate_minutes):
                record_held_out()
        checkpoints.save(manager, state, progress, config)
        if not signals.stopped:
            record_held_out()
        done = progress.tokens >= schedule.train_tokens
        status = dataclasses.asdict(progress) | {"finished": done}
        write_text(out_dir / "status.json", json.dumps(status) + "\n")
        return progress


def _summary(window, progress, rate: float, tokens_per_s: float) -> dict:
    """A metrics record of the steps since the last one."""
    counts_LE = sum(np.asarray(m["counts_LE"], np.int64) for m in window)
    share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    losses = [float(m["loss"]) for m in window]
    if not np.isfinite(losses).all():
        raise ConfigError(
            f"the loss is {losses[-1]} at step {progress.step}; lower the learning "
            "rate and resume from the last checkpoint"
        )
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": round(float(np.mean(losses)), 4),
        "balance": round(float(np.mean([float(m["balance"]) for m in window])), 4),
        "grad_norm": round(float(window[-1]["grad_norm"]), 4),
        "learning_rate": rate,
        "max_load": round(float(share_LE.max() * share_LE.shape[1]), 2),
        "min_load": round(float(share_LE.min() * share_LE.shape[1]), 3),
        "tokens_per_s": round(tokens_per_s, 1),
        "seconds": round(progress.seconds, 1),
    }
