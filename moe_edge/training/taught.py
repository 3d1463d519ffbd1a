"""Fine-tunes the default model on its generators' tasks and writes what comes of it.

    python -m moe_edge.training.taught ../taught

Only answers are learnt (`tasks.py`). The new folder's config.json says what it was made
of. A run that was stopped, by SIGTERM too, goes on with the same command; it keeps its
work in `../taught.training` until it ends. The default model stays as it is: entries
that judge lossy options on a model that solves more of its tasks name the new folder.
"""

import argparse
import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from moe_edge.convert.hf_config import FINE_TUNED
from moe_edge.convert.open import check_floats, check_unpruned, open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, MoeEdgeError, check_count, check_positive
from moe_edge.core.files import (
    check_apart,
    check_out_dir,
    check_work_folder,
    locked_folder,
    write_text,
)
from moe_edge.core.heap import keep_heap
from moe_edge.core.json_reader import read_json
from moe_edge.training import tasks
from moe_edge.training.data import check_length
from moe_edge.training.evaluation import right_answers
from moe_edge.training.export import check_exportable, export_hf, read_newest
from moe_edge.training.generators import FAMILIES
from moe_edge.training.loop import METRICS_FILE, train
from moe_edge.training.options import Hyper, RunOptions
from moe_edge.training.resume import SETTINGS_FILE, differences
from moe_edge.training.schedule import Schedule
from moe_edge.training.start import stored_params
from moe_edge.training.tokenizer import END_OF_TEXT

MOST_TOKENS = 10**9  # four days of two cores
DECAY_SHARE = 0.5  # of all tokens, the last ones
HELD_OUT = 128  # questions of a family, asked from time to time
LEAST_LENGTH = 64  # of a row: a shorter one ends within its text, before any answer


@dataclasses.dataclass(frozen=True)
class Teaching:
    """What is taught and how long; a run keeps it from its start to its end.

    Attributes:
      tokens: of questions and answers.
      batch_tokens: of a step.
      learning_rate: its peak, half of pretraining's: a step has fewer targets.
      length: of a row until the rate falls.
      long_length: of a row from then on.
      mix: rows of each family and exercise in a cycle, as `tasks.parse_mix` reads them.
      seed: of the questions.
    """

    tokens: int = 4_000_000
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    length: int = 256
    long_length: int = 256
    mix: str = ",".join(f"{family}={rows}" for family, rows in tasks.MIX.items())
    seed: int = 0

    def __post_init__(self):
        for name in ("tokens", "batch_tokens", "length", "long_length"):
            check_count(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        if self.tokens > MOST_TOKENS:
            raise ConfigError(
                f"tokens is {self.tokens}, expected at most {MOST_TOKENS}: four days "
                "of two cores"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(
                f"seed is {self.seed}, expected 0 or more, of 63 bits at most"
            )
        tasks.parse_mix(self.mix)
        for name in ("length", "long_length"):
            if (length := getattr(self, name)) < LEAST_LENGTH:
                raise ConfigError(
                    f"{name} is {length}, expected {LEAST_LENGTH} or more: a shorter "
                    "row ends before the answer"
                )
            check_length(length)

    @property
    def schedule(self) -> Schedule:
        """A short warm-up, a plateau, a decay."""
        return Schedule(
            peak=self.learning_rate,
            warmup_tokens=max(1, self.tokens // 100),
            train_tokens=self.tokens,
            decay_tokens=max(1, int(self.tokens * DECAY_SHARE)),
        )


def teach(
    out_dir: str | Path,
    teaching: Teaching,
    *,
    checkpoint: str | Path = "default",
    checkpoint_minutes: float = 5.0,
    evaluate_minutes: float = 10.0,
    pause_file: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, float] | None:
    """Fine-tunes, or goes on; the same weights for the same settings on one machine.

    Args:
      out_dir: the new Hugging Face folder.
      checkpoint: the model to begin with, of the default one's kind.
      checkpoint_minutes, evaluate_minutes: between checkpoints, between evaluations.
      pause_file: while it exists the loop sleeps between steps.
      overwrite: replace what `out_dir` holds.
      dry_run: check all of that, write nothing.
    Returns:
      The share of held-out questions that it answers rightly, by family; None if it
      was stopped before its end, or checked only.
    Raises:
      ConfigError: a checkpoint of another kind; work of another run.
      OutputError: the folder cannot be written.
    """
    options = RunOptions(
        batch_tokens=teaching.batch_tokens,
        length=teaching.length,
        long_length=teaching.long_length,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
        pause_file=pause_file,
    )
    longest = max(teaching.length, teaching.long_length)
    reader, tokenizer = open_teachable(checkpoint, longest)
    folder = check_out_dir(out_dir, overwrite)
    check_apart(folder, reader.path)
    work = folder.with_name(f"{folder.name}.training")
    facts = dataclasses.asdict(teaching) | {"content_sha256": reader.content_sha256()}
    check_work(work, facts)
    check_work_folder(work)
    if dry_run:
        return None
    keep_heap()
    with locked_folder(work, str(out_dir)):
        write_text(work / SETTINGS_FILE, json.dumps(facts, indent=1) + "\n")
        mix = tasks.parse_mix(teaching.mix)
        asked = {
            family: tasks.held_out_questions(tokenizer, family, teaching.seed, HELD_OUT)
            for family in mix
            if family in FAMILIES
        }
        evaluate = right_answers(reader.config, asked)
        progress = train(
            reader.config,
            tasks.TaskRows(tokenizer, mix, teaching.seed),
            work,
            schedule=teaching.schedule,
            hyper=Hyper(),
            options=options,
            start=functools.partial(stored_params, reader),
            evaluate=evaluate,
        )
        if progress.tokens < teaching.tokens:
            return None
        params, progress, config = read_newest(work)
        found = evaluate(params)
        said = (
            f"{checkpoint} model, on its generators' tasks: "
            f"{progress.tokens / 1e6:.2f} M tokens, seed {teaching.seed}"
        )
        export_hf(
            params,
            config,
            tokenizer,
            folder,
            extra_files={
                "README.md": card(said, teaching, progress.seconds, found),
                METRICS_FILE: (work / METRICS_FILE).read_bytes(),
            },
            said={FINE_TUNED: said},
            overwrite=overwrite,
        )
        shutil.rmtree(work)
    return found


def open_teachable(checkpoint: str | Path, length: int):
    """(reader, tokenizer) of a checkpoint, in float32.

    Raises:
      ConfigError: weights that are no floats, another architecture than export can
        write, another tokenizer than `moe-edge pretrain` makes, too few positions.
      CheckpointError: see `load_tokenizer`.
    """
    reader = open_checkpoint(checkpoint, np.dtype(np.float32))
    check_floats(reader, "fine-tuning")
    check_unpruned(reader, "fine-tuning")
    config = reader.config
    check_exportable(config)
    load_tokenizer(reader)  # refuses what cannot be read or does not fit
    tokenizer = Tokenizer.from_file(str(reader.tokenizer_path))
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None or config.eos_ids != (end,):
        raise ConfigError(
            f"{reader.tokenizer_path} gives {END_OF_TEXT} the id {end}, expected that "
            f"of config.json, {list(config.eos_ids)}; give a model of moe-edge pretrain"
        )
    if length > config.max_positions:
        raise ConfigError(
            f"rows have {length} tokens, expected at most {config.max_positions}, the "
            "model's positions"
        )
    return reader, tokenizer


def check_work(work: Path, facts: dict[str, str | int | float]) -> None:
    """Raises ConfigError where a folder of work is of a run with other settings."""
    if not work.is_dir() or not any(work.iterdir()):
        return
    stored = read_json(work / SETTINGS_FILE) if (work / SETTINGS_FILE).is_file() else {}
    differing = differences(facts, stored if isinstance(stored, dict) else {})
    if differing:
        raise ConfigError(
            f"{work} is not of this run: {differing}; give its settings again, delete "
            "it or name another folder"
        )


def card(said: str, teaching: Teaching, seconds: float, found: dict[str, float]) -> str:
    """README.md of the new folder."""
    shares = "".join(f"| {family} | {right:.3f} |\n" for family, right in found.items())
    return f"""\
# Fine-tuned: {said}

Not the default model: its weights went on learning answers to questions of
`moe_edge/training/generators.py`, by `python -m moe_edge.training.taught`. What it knew
of other texts may be lost. It is meant for judging lossy options on a model that
solves more of what it is asked.

- Loss on answers alone; {teaching.batch_tokens} tokens a step; rows of
  {teaching.length} tokens, of {teaching.long_length} once the rate falls, of a cycle
  {teaching.mix}; up to {tasks.MOST_ASKED} questions on one text.
  No row was seen twice. It took {seconds / 60:.0f} minutes.
- AdamW as in pretraining, rate {teaching.learning_rate:g}, from
  {1 - DECAY_SHARE:.0%} of the tokens on falling.

Exact match of {HELD_OUT} questions of each family from another seed. Texts of stories
and tables are new there; sums and words are few, so many of them were learnt:

| family | right |
| --- | ---: |
{shares}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the folder that a command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m moe_edge.training.taught")
    parser.add_argument("out_dir", help="the Hugging Face folder to write")
    for field in dataclasses.fields(Teaching):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    parser.add_argument("--checkpoint", default="default")
    parser.add_argument("--checkpoint_minutes", type=float, default=5.0)
    parser.add_argument("--evaluate_minutes", type=float, default=10.0)
    parser.add_argument("--pause_file", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--dry_run", action="store_true")
    given = vars(parser.parse_args(arguments))
    fields = [field.name for field in dataclasses.fields(Teaching)]
    try:
        teaching = Teaching(**{name: given.pop(name) for name in fields})
        found = teach(teaching=teaching, **given)
    except MoeEdgeError as error:
        sys.exit(f"error: {error}")
    if found is not None:
        shares = ", ".join(f"{family} {right:.3f}" for family, right in found.items())
        print(f"Right answers: {shares}: {given['out_dir']}")


if __name__ == "__main__":
    main()
