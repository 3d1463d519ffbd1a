"""A tiny refactored checkpoint with a text to fine-tune its router on, in seconds."""

import shutil
from pathlib import Path

from moe_edge.convert.open import open_checkpoint
from moe_edge.papers.moe_prism.refactor.finetune import train
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from moe_edge.papers.moe_prism.refactor.texts import read_windows
from tests.support.refactored import write_random
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

OPTIONS = {
    "tokens": 384,
    "batch_tokens": 32,
    "accumulate": 2,
    "learning_rate": 0.03,
    "k_start": 2,
    "k_end": 4,
    "k_stages": 2,
    "window": 16,
    "held_out_rows": 2,
}


def write_source(folder: Path) -> Path:
    """Writes train.txt, a model and its split into 16; returns the folder."""
    (folder / "train.txt").write_text(TEXT * 12)
    write_tiny_checkpoint(folder / "parent")
    write_random(folder / "parent", folder / "model", subs=2)
    return folder


def windows_of(source: Path, settings: FineTuning, text: str = "train.txt"):
    reader = open_checkpoint(source / "model")
    return read_windows(reader, [str(source / text)], settings)


def finetune_tiny(source: Path, out: Path, max_minutes=None, text="train.txt", **given):
    """Six steps on the source's text, three with each K."""
    settings = FineTuning(**OPTIONS | given)
    windows = windows_of(source, settings, text)
    model = out.with_name(f"{out.name}.untrained")
    shutil.rmtree(model, ignore_errors=True)
    reader = open_checkpoint(shutil.copytree(source / "model", model))
    return train.finetune_router(reader, settings, windows, out, max_minutes)
