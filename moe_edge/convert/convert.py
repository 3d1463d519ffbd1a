"""Converts a checkpoint: Hugging Face or GGUF -> ours, or -> Hugging Face.

Nothing appears at the destination before everything is there. What an interrupted
conversion has done is kept beside it (unfinished.py), and the same command goes on.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert import check as checks
from moe_edge.convert.digest import source_facts
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.safetensors_writer import parse_size
from moe_edge.convert.stream import stream, stream_items
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.convert.unfinished import unfinished_work
from moe_edge.convert.weights import EXPERT_DTYPES, hf_dtypes, num_bytes
from moe_edge.convert.work import check_digest, open_work
from moe_edge.core.checks import (
    ConfigError,
    OutputError,
    check_count,
    check_from_zero,
    check_known,
)
from moe_edge.core.files import check_room
from moe_edge.core.process import peak_rss_bytes
from moe_edge.core.progress import say
from moe_edge.core.run_folder import RunFolder
from moe_edge.model.quantised import DENSE_KINDS
from moe_edge.model.record import RecordLayout


def convert_checkpoint(
    src: str | Path | None = None,
    dst: str | Path | None = None,
    *,
    to: str = "ours",
    dtype: str | None = None,
    expert_dtype: str | None = None,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    shard_size: str | int = "5GB",
    workers: int = 0,
    max_layers: int | None = None,
    progress: bool = True,
    verify: bool = False,
    check: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Converts one checkpoint folder into another, or verifies one of ours.

    Args:
      src: an HF folder, a GGUF file, a folder of ours, or "default".
      dst: the new folder.
      to: "ours" or "hf".
      dtype: cast weights to float32, bfloat16 or float16 (None: as stored), or
        quantise matrices to q8_0 or q4_0, all but routers and an embedding that is not
        the head; lossy: moe-edge fidelity --checkpoint DST --reference SRC says how
        much.
      expert_dtype: quantise the routed experts, q8_0, q4_0 or mxfp4 (None: as others);
        fp8, int4: take them over as a Hugging Face folder stores them, bit for bit.
      overwrite: replace a non-empty `dst`.
      allow_nonfinite: accept NaN and infinity in weights.
      shard_size: most bytes of a safetensors shard (to="hf").
      workers: threads that read, change, hash and write; 0: as many as cores. Each
        holds some 100 MB, or of quantised experts a few times one expert as float32.
      max_layers: stop after so many layers, among which the embedding and the head
        count, too; the same command goes on with the next ones (None: do all).
      progress: show a progress bar on stderr.
      verify: read `src`, of ours, and compare its weights with the hash in its
        manifest; write nothing.
      check: say whether `src` will load, what is not supported, and how large it is,
        from config.json and the tensors' names and shapes alone; write nothing.
      dry_run: check everything but the weights' values, write nothing.
      config_text: gives the settings to store as `dst`/config.gin.
    Returns:
      bytes (of weights written), seconds, peak_rss_bytes, content_sha256, tensors,
      dropped (names the model does not use); expert_dtype, dense_dtype, or dequantised
      (what they were) where they changed; where `max_layers` stopped it finished=False,
      items_left and work_dir instead; with `verify` content_sha256 and seconds;
      with `check` see `check.summary`.
    Raises:
      CheckpointError, ConfigError: bad source; OutputError: bad destination.
    """
    start = time.monotonic()
    for flag, given in (("verify", verify), ("check", check)):
        if given and dst:
            raise ConfigError(f"--{flag} writes nothing, got --dst {dst}; leave it out")
    if verify and check:
        raise ConfigError("--verify reads all weights, --check none; leave out one")
    dense = dtype if dtype in DENSE_KINDS else None
    wanted = _weight_dtype(dtype)
    expert_dtype = dense if expert_dtype is None else expert_dtype
    if check:
        return _checked(src, wanted, expert_dtype, start)
    if verify:
        digest = verify_checkpoint(src)
        seconds = round(time.monotonic() - start, 3)
        return {"verified": True, "content_sha256": digest, "seconds": seconds}
    for name, value in (("src", src), ("dst", dst)):
        if not value:
            raise ConfigError(f"no {name} given; name a folder with --{name}")
    check_known("target", to, ("ours", "hf"))
    shard_bytes = parse_size(shard_size)
    check_from_zero("workers", workers)
    if max_layers is not None:
        check_count("max_layers", max_layers)
    work = open_work(src, to, wanted, expert_dtype, dense)
    source, reader = work.source, work.reader
    run = RunFolder(dst, overwrite, dry_run, config_text)
    run.check_apart(reader.path)
    if reader.tokenizer_path is not None:
        load_tokenizer(reader)  # a broken one is refused before it is copied
    if dry_run:
        return {
            "dry_run": True,
            "model_type": reader.config.model_type,
            "dropped": reader.dropped,
        }
    facts = {
        "source": source_facts(source),
        "to": to,
        "dtype": dtype,
        "expert_dtype": expert_dtype,
        "allow_nonfinite": allow_nonfinite,
        "shard_size": shard_bytes if to == "hf" else None,
    }
    items = stream_items(reader.config)
    try:
        with run.taken(), unfinished_work(run.path, facts) as kept:
            folder, done = kept.made, kept.done(items)
            left = [item for item in items if item not in done]
            check_room(folder, num_bytes(reader, left[:max_layers]))
            with contextlib.closing(work.sink(folder, to, shard_bytes)) as sink:
                how = {"workers": workers, "unfinished": kept, "most": max_layers}
                digest = stream(reader, sink, allow_nonfinite, progress, **how)
                if digest is None:
                    say(f"stopped; the same command goes on in {kept.path}")
                    return {
                        "finished": False,
                        "items_left": len(left) - max_layers,
                        "work_dir": str(kept.path),
                        **_measured(start),
                    }
                work.check(digest)
                sink.finish(digest)
            run.move(folder)
    except OSError as error:
        raise OutputError(f"converting {src} to {dst} failed: {error}") from error
    return {
        "bytes": num_bytes(reader, items),
        **_measured(start),
        "content_sha256": digest,
        "tensors": len(hf_dtypes(reader)),
        "dropped": reader.dropped,
        **({"expert_dtype": expert_dtype} if expert_dtype else {}),
        **({"dense_dtype": dense} if dense else {}),
        **({"dequantised": work.was} if work.was else {}),
    }


def _measured(start: float) -> dict[str, Any]:
    """Time since `start`, and memory."""
    seconds = round(time.monotonic() - start, 3)
    return {"seconds": seconds, "peak_rss_bytes": peak_rss_bytes()}


def _weight_dtype(name: str | None) -> np.dtype | None:
    """What weights are cast to; None: nothing, or they are quantised."""
    if name is not None:
        check_known("dtype", name, (*WEIGHT_DTYPES, *DENSE_KINDS))
    return WEIGHT_DTYPES.get(name)


def _checked(
    src: str | Path | None,
    dtype: np.dtype | None,
    expert_dtype: str | None,
    start: float,
) -> dict[str, Any]:
    """Prints what is known of a checkpoint without its weights; returns it.

    Raises:
      DoesNotLoad: it does not.
    """
    if not src:
        raise ConfigError("no src given; name a folder with --src")
    if expert_dtype is not None:
        check_known("expert dtype", expert_dtype, EXPERT_DTYPES)
    found = checks.check_checkpoint(src, dtype)
    if expert_dtype is not None and found.config is not None:
        with found.collecting():
            RecordLayout.of(with_kind(found.config, expert_dtype))
    for line in checks.lines(found):
        print(line)
    summary = checks.summary(found) | {"seconds": round(time.monotonic() - start, 3)}
    if found.reasons:
        reasons = "; ".join(found.reasons)
        raise checks.DoesNotLoad(f"{src} does not load: {reasons}", summary)
    return summary


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
    return check_digest(reader)
