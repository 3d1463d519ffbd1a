"""A tiny checkpoint with texts to fine-tune its router on, in seconds."""

from pathlib import Path

from moe_edge.refactor.finetune.finetune import finetune_router
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

OPTIONS = {
    "tokens": 384,
    "batch_tokens": 32,
    "accumulate": 2,
    "learning_rate": 0.03,
    "k_start": 1,
    "k_end": 2,
    "k_stages": 2,
    "window": 16,
    "held_out_rows": 2,
    "checkpoint_minutes": 0.0,
}


def write_source(folder: Path) -> Path:
    """Writes model, train.txt and held_out.txt; returns the folder."""
    (folder / "train.txt").write_text(TEXT * 12)
    (folder / "held_out.txt").write_text(TEXT * 2)
    write_tiny_checkpoint(folder / "model")
    return folder


def finetune_tiny(source: Path, out: Path, **options):
    """Six steps on the source's texts, three with each K."""
    return finetune_router(
        source / "model",
        str(source / "train.txt"),
        out,
        held_out_text=str(source / "held_out.txt"),
        **OPTIONS | options,
    )
