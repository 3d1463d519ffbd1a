"""Converts a checkpoint: Hugging Face or GGUF -> ours, or -> Hugging Face.

Nothing appears at the destination before everything is there.
"""

import contextlib
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import weight_dtype
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert import rules
from moe_edge.convert.content_hash import content_sha256, stream
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.hf_files import converted_config
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_config import refactored_hf_config
from moe_edge.convert.safetensors_writer import parse_size
from moe_edge.convert.sinks import HfSink, OursSink
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError, check_known
from moe_edge.core.files import check_room
from moe_edge.core.run_folder import RunFolder


def convert_checkpoint(
    src: str | Path | None = None,
    dst: str | Path | None = None,
    *,
    to: str = "ours",
    dtype: str | None = None,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    shard_size: str | int = "5GB",
    progress: bool = True,
    verify: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Converts one checkpoint folder into another, or verifies one of ours.

    Args:
      src: an HF folder, a GGUF file, a folder of ours, or "default".
      dst: the new folder.
      to: "ours" or "hf".
      dtype: cast weights to float32, bfloat16 or float16 (None: as stored).
      overwrite: replace a non-empty `dst`.
      allow_nonfinite: accept NaN and infinity in weights.
      shard_size: most bytes of a safetensors shard (to="hf").
      progress: show a progress bar on stderr.
      verify: read `src`, of ours, and compare its weights with the hash in its
        manifest; write nothing.
      dry_run: check everything but the weights' values, write nothing.
      config_text: gives the settings to store as `dst`/config.gin.
    Returns:
      bytes (of weights written), seconds, peak_rss_bytes, content_sha256, tensors,
      dropped (names the model does not use); with `verify` content_sha256 and seconds.
    Raises:
      CheckpointError, ConfigError: bad source; OutputError: bad destination.
    """
    start = time.monotonic()
    if verify:
        if dst:
            raise ConfigError(f"--verify writes nothing, got --dst {dst}; leave it out")
        digest = verify_checkpoint(src)
        seconds = round(time.monotonic() - start, 3)
        return {"verified": True, "content_sha256": digest, "seconds": seconds}
    for name, value in (("src", src), ("dst", dst)):
        if not value:
            raise ConfigError(f"no {name} given; name a folder with --{name}")
    check_known("target", to, ("ours", "hf"))
    wanted, shard_bytes = weight_dtype(dtype), parse_size(shard_size)
    reader = open_checkpoint(src, wanted)
    raw = reader.config.hf_config
    if reader.config.moe.sub_experts > 1:
        if to == "ours":
            raise CheckpointError(
                f"{src} is refactored and in our format already; to change its dtype, "
                "convert the checkpoint it was made from and refactor that"
            )
        raw = refactored_hf_config(reader.config)
    run = RunFolder(dst, overwrite, dry_run, config_text)
    run.check_apart(reader.path)
    if dry_run:
        return {"dry_run": True, "model_type": reader.config.model_type}
    changed = wanted is not None or reader.quantized is not None
    raw = converted_config(raw, reader.dtype.name, changed)
    config = config_from_hf(raw)
    try:
        with run.writing() as folder:
            dtypes, shapes = hf_dtypes(reader), rules.hf_shapes(config)
            sizes = (math.prod(shapes[n]) * dtypes[n].itemsize for n in shapes)
            check_room(folder, sum(sizes))
            if to == "ours":
                sink = OursSink(folder, config, reader)
            else:
                sink = HfSink(folder, config, reader, dtypes, shard_bytes)
            with contextlib.closing(sink):
                digest, total_bytes = stream(reader, sink, allow_nonfinite, progress)
                if isinstance(reader, CheckpointReader):
                    # If changed, `digest` is of what was written: read once more.
                    _check_digest(reader, None if changed else digest)
                sink.finish(digest)
    except OSError as error:
        raise OutputError(f"converting {src} to {dst} failed: {error}") from error
    return {
        "bytes": total_bytes,
        "seconds": round(time.monotonic() - start, 3),
        # ru_maxrss is in KiB on Linux.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "content_sha256": digest,
        "tensors": len(shapes),
        "dropped": reader.dropped,
    }


def verify_checkpoint(src: str | Path | None) -> str:
    """Reads a checkpoint of ours and returns the hash that its manifest states.

    Raises:
      CheckpointError: its weights have another hash.
      ConfigError: a Hugging Face folder or GGUF file, which states none.
    """
    if not src:
        raise ConfigError("no src given; name a folder with --src")
    reader = open_checkpoint(src)
    if not isinstance(reader, CheckpointReader):
        kind = "GGUF file" if reader.path.is_file() else "Hugging Face folder"
        raise ConfigError(
            f"{src} is a {kind}, which states no content_sha256 to verify it by; "
            "convert it first"
        )
    return _check_digest(reader)


def _check_digest(reader, digest: str | None = None) -> str:
    """The hash in a manifest of ours, if the weights have it (None: reads them)."""
    stored = reader.content_sha256()
    if digest is None:
        digest = content_sha256(open_checkpoint(reader.path))
    if stored != digest:
        raise CheckpointError(
            f"the weights of {reader.path} hash to {digest[:16]}..., its manifest says "
            f"{stored[:16]}...; a file was altered, convert the original again"
        )
    return stored


def hf_dtypes(reader) -> dict[str, np.dtype]:
    """HF name -> dtype of every tensor that a checkpoint holds."""
    config = reader.config
    dtypes: dict[str, np.dtype] = {}
    for item in dense_items(config):
        names = rules.dense_names(config, item)
        stored = reader.dense_dtypes(item)
        dtypes |= {names[name]: dtype for name, dtype in stored.items()}
        if item in config.moe_layers:
            dtypes |= dict.fromkeys(rules.expert_shapes(config, item), reader.dtype)
    return dtypes
