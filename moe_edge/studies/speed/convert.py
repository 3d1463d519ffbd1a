"""Suite `convert`: time and memory of conversion, compared with copying the files."""

import functools
import os
import shutil
from pathlib import Path

from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import Rows, SuiteSettings, make_row, speed_study
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.core.process import alone
from moe_edge.studies.speed.models import olmoe_config, write_random

LAYERS = 18  # 2.0 GB in bfloat16


def convert_models(work_dir: Path) -> list[tuple[str, Path]]:
    """Name and HF folder of the model that is converted."""
    folder = write_random(work_dir / "olmoe_2gb", olmoe_config(LAYERS, "bfloat16"))
    return [(f"random in OLMoE's shape, {LAYERS} layers, bfloat16", folder)]


def convert_rows(settings: SuiteSettings, work_dir: Path) -> Rows:
    """Seconds to convert a 2 GB random checkpoint, both ways; peak memory.

    Each conversion is a process of its own, so that its peak is its own; its seconds
    leave out Python's start. The peer is a plain copy of the same folder; one turn of
    each is not measured, so that files are warm. `ratio` is conversion / copy: lower
    is better. Each begins with all earlier writes on the disk: who writes third would
    otherwise be slowed by what the first two have left to write.
    """
    ((_, source),) = convert_models(work_dir)
    ours, target = work_dir / "ours", work_dir / "target"
    _convert(source, ours, "ours")  # the source of to_hf
    jobs = {
        "copy": functools.partial(_copy, source),
        "to_ours": functools.partial(_convert, source, to="ours"),
        "to_hf": functools.partial(_convert, ours, to="hf"),
    }
    cases = {
        name: functools.partial(_on_clean_disk, job, target)
        for name, job in jobs.items()
    }
    runs = interleave(cases, settings.repeats)
    shutil.rmtree(target)
    shutil.rmtree(ours)
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    return [
        make_row(
            f"convert/{name}",
            seconds[name],
            "s",
            peer=seconds["copy"],
            peer_name="shutil.copytree",
            bytes=runs[name][-1]["bytes"],
            peak_rss_bytes=max(run["peak_rss_bytes"] for run in runs[name]),
        )
        for name in ("to_ours", "to_hf")
    ]


def _on_clean_disk(job, target: Path) -> dict:
    """Runs a job with no `target` yet and all earlier writes on the disk."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    return job(target)


def _copy(source: Path, target: Path) -> dict:
    return {"seconds": seconds_of(functools.partial(shutil.copytree, source, target))}


def _convert(src: Path, dst: Path, to: str) -> dict:
    """In a process of its own."""
    options = {"to": to, "overwrite": True, "progress": False}
    return alone(functools.partial(convert_checkpoint, src, dst, **options))


STUDY = speed_study(
    "convert",
    "How long does a conversion take, compared with copying the files?",
    convert_rows,
    lambda _, work_dir: convert_models(work_dir),
)
