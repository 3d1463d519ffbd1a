"""Fine-tunes the rows of a linear gate: MoE-Prism, section 4.3.2.

Cross-entropy of the whole model, everything but the router frozen, and K, the number
of (sub-)experts a token computes, growing linearly from `k_start` to `k_end`. K moves
in a few stages, since every K is a program of its own.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CapacityError, build_known
from moe_edge.core.files import check_apart, check_out_dir, locked_folder
from moe_edge.core.heap import keep_heap
from moe_edge.model.config import ModelConfig
from moe_edge.refactor.finetune.data import Windows, read_windows
from moe_edge.refactor.finetune.step import check_trainable, parameter_counts
from moe_edge.refactor.finetune.train import FineTuning, Run, forget
from moe_edge.refactor.finetune.write import stored_router, write_fine_tuned
from moe_edge.training.control import say, short


def finetune_router(
    checkpoint: str | Path,
    train_text: str,
    out_dir: str | Path,
    *,
    held_out_text: str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    max_minutes: float | None = None,
    checkpoint_minutes: float = 5.0,
    **options,
) -> dict[str, Any]:
    """Trains the router's rows of a checkpoint and writes the model.

    While it runs, its state is in `<out_dir>.training`, from which a second call with
    the same arguments goes on exactly; the folder disappears with the last step.

    Args:
      checkpoint: refactored with a linear gate, or any ordinary model; of either
        format, or "default".
      train_text: UTF-8 files, separated by commas.
      out_dir: the new checkpoint, in our format; its experts are hard links to those
        of a `checkpoint` of ours (see `write_fine_tuned`).
      held_out_text: a file to report the loss on; None: the training text's end,
        which is then not trained on.
      resume: False starts from the beginning.
      max_minutes: stop after so many minutes, to go on another time.
      **options: of `FineTuning`.
    Returns:
      finished, step, steps, tokens, seconds, trained_parameters, parameters,
      trained_share, k_values, text_sha256, held_out_before (perplexity by K); once
      finished also out_dir and held_out_after, of the rows as they are stored.
    Raises:
      ConfigError: unknown or bad options, K out of range, a gate without rows of its
        own, or a state of other settings; CapacityError: a window beyond the context;
      RequestError: too little text; OutputError: a folder that cannot be written, or
        into which another run trains.
    """
    out = check_out_dir(out_dir, overwrite)
    reader = open_checkpoint(checkpoint)
    check_apart(out, reader.path)
    settings, text = check_fine_tuning(
        reader, reader.config, train_text, held_out_text, options
    )
    stages = settings.stages(reader.config)
    keep_heap()
    state_dir = out.with_name(f"{out.name}.training")
    trained, total = parameter_counts(reader.config)
    say(f"trains {trained} of {total} parameters ({trained / total:.3%}), K {stages}")
    facts = dataclasses.asdict(settings) | {
        "model_sha256": reader.content_sha256(),
        "text_sha256": text.sha256,
        "held_out_sha256": hashlib.sha256(text.held_out.tobytes()).hexdigest(),
    }
    with locked_folder(state_dir, str(out)):
        if not resume:
            forget(state_dir)
        run = Run(reader, settings, text, state_dir)
        done = run.train(facts, max_minutes, checkpoint_minutes)
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
            "k_start": stages[0],
            "k_end": stages[-1],
            "text_sha256": text.sha256,
        }
        write_fine_tuned(reader, stored, out, fine_tuned, overwrite)
        shutil.rmtree(state_dir)
        return summary | {"out_dir": str(out), "held_out_after": after}


def check_fine_tuning(
    reader,
    config: ModelConfig,
    train_text: str,
    held_out_text: str | None,
    options: Mapping[str, Any],
) -> tuple[FineTuning, Windows]:
    """Checks what `finetune_router` will be given, before any work.

    Args:
      reader: for its tokenizer.
      config: of the model to train, which may not be written yet.
      train_text, held_out_text, options: see `finetune_router`.
    Raises:
      as `finetune_router`.
    """
    settings = build_known(
        "settings", {"fine_tuning": FineTuning}, "fine_tuning", options
    )
    check_trainable(config)
    settings.stages(config)
    if settings.window > config.max_positions:
        raise CapacityError(
            f"window of {settings.window} tokens exceeds the model's context of "
            f"{config.max_positions}"
        )
    text = read_windows(
        load_tokenizer(reader),
        train_text,
        held_out_text,
        window=settings.window,
        held_out_rows=settings.held_out_rows,
    )
    return settings, text
