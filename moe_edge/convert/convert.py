"""Converts a checkpoint: Hugging Face or GGUF -> ours, or -> Hugging Face.

Nothing appears at the destination before everything is there.
"""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.checkpoint.schema import dense_items, item_shapes, name_some
from moe_edge.convert import check as checks
from moe_edge.convert import rules
from moe_edge.convert.content_hash import content_sha256, stream
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.convert.hf_files import converted_config, read_generation
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_config import refactored_hf_config
from moe_edge.convert.requantise import Dequantised, Interleaved, Quantised, not_whole
from moe_edge.convert.safetensors_writer import parse_size
from moe_edge.convert.sinks import HfSink, OursSink
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError, check_known
from moe_edge.core.files import check_room
from moe_edge.core.process import peak_rss_bytes
from moe_edge.core.progress import say_once
from moe_edge.core.run_folder import RunFolder
from moe_edge.model.quantised import BLOCK, DENSE_KINDS, KINDS, format_of, row_bytes
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
      expert_dtype: quantise the routed experts, q8_0, q4_0 or mxfp4 (None: as others).
      overwrite: replace a non-empty `dst`.
      allow_nonfinite: accept NaN and infinity in weights.
      shard_size: most bytes of a safetensors shard (to="hf").
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
      (what they were) where they changed; with `verify` content_sha256 and seconds;
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
    wanted, expert_dtype = _weight_dtype(dtype), expert_dtype or dense
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
    source = open_checkpoint(src, wanted)
    reader = _requantised(source, to, expert_dtype, dense, wanted)
    if to == "ours" and (reader.layout.kind or reader.dense_kind):
        reader = Interleaved(reader)
    raw, refactor, pruned = reader.config.hf_config, None, None
    generation = read_generation(reader.hf_files)
    if reader.config.moe.sub_experts > 1 and to == "ours":
        if expert_dtype is None:
            raise CheckpointError(
                f"{src} is refactored and in our format already; to change its dtype, "
                "convert the checkpoint it was made from and refactor that"
            )
        refactor = source.manifest["refactor"]
    elif reader.config.moe.sub_experts > 1:
        raw = refactored_hf_config(reader.config, generation)
    if isinstance(source, CheckpointReader):
        pruned = source.manifest.get("pruned")
        if pruned is not None and to == "hf":
            raise CheckpointError(
                f"{src} is pruned, and Hugging Face has no such model; export the "
                "checkpoint it was made from"
            )
    run = RunFolder(dst, overwrite, dry_run, config_text)
    run.check_apart(reader.path)
    if reader.tokenizer_path is not None:
        load_tokenizer(reader)  # a broken one is refused before it is copied
    cast = wanted is not None or reader.quantized is not None
    dequantised = isinstance(reader, Dequantised)
    held = reader if dequantised else source
    was = format_of(reader.kind) if dequantised else None
    if isinstance(source, GgufReader) and expert_dtype is None:
        was = was or source.decoded_experts
    stated = wanted or held.layout.value_dtype(held.dtype)
    raw = converted_config(raw, stated.name, cast or dequantised)
    config = with_kind(
        config_from_hf(raw, generation), reader.layout.kind or reader.dtype.name
    )
    if dry_run:
        return {
            "dry_run": True,
            "model_type": reader.config.model_type,
            "dropped": reader.dropped,
        }
    try:
        with run.writing() as folder:
            dtypes, num_bytes = hf_dtypes(reader), _num_bytes(reader)
            check_room(folder, num_bytes)
            if to == "ours":
                subs = reader.config.moe.sub_experts
                sink = OursSink(folder, config, reader, subs, refactor, pruned)
            else:
                sink = HfSink(folder, config, reader, dtypes, shard_bytes)
            with contextlib.closing(sink):
                digest = stream(reader, sink, allow_nonfinite, progress)
                if isinstance(source, CheckpointReader):
                    if not cast and expert_dtype is None:
                        _check_digest(source, digest)
                    elif source.checksums is None:
                        # `digest` is of what was written, and no CRC has vouched for
                        # what was read: read once more.
                        _check_digest(source)
                sink.finish(digest)
    except OSError as error:
        raise OutputError(f"converting {src} to {dst} failed: {error}") from error
    return {
        "bytes": num_bytes,
        "seconds": round(time.monotonic() - start, 3),
        "peak_rss_bytes": peak_rss_bytes(),
        "content_sha256": digest,
        "tensors": len(dtypes),
        "dropped": reader.dropped,
        **({"expert_dtype": expert_dtype} if expert_dtype else {}),
        **({"dense_dtype": dense} if dense else {}),
        **({"dequantised": was} if was else {}),
    }


def _weight_dtype(name: str | None) -> np.dtype | None:
    """What weights are cast to; None: nothing, or they are quantised."""
    if name:
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
        check_known("expert dtype", expert_dtype, KINDS)
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


def _requantised(
    reader,
    to: str,
    expert_dtype: str | None,
    dense: str | None,
    wanted: np.dtype | None,
):
    """The reader, or one that quantises its weights, or one that undoes it.

    Raises:
      ConfigError: an unknown kind, one for a HF folder, or sizes that it cannot hold.
      CheckpointError: weights that are quantised already.
    """
    kind = reader.layout.kind
    if expert_dtype is not None:
        check_known("expert dtype", expert_dtype, KINDS)
        if to == "hf":
            flag = "--dtype" if dense == expert_dtype else "--expert_dtype"
            raise ConfigError(
                f"{flag} {expert_dtype} is of our format, Hugging Face folders have no "
                f"such weights; leave out one of {flag} and --to hf"
            )
    is_ours = isinstance(reader, CheckpointReader)
    was = format_of(kind or reader.dense_kind)
    if to == "ours" and is_ours and was is not None:
        raise CheckpointError(
            f"{reader.path} has {was} weights and is in our format already; convert "
            "the checkpoint it was made from"
        )
    if isinstance(reader, GgufReader):
        _say_rounded(reader, expert_dtype, dense)
    if dense is not None and (floats := not_whole(reader.config)):
        say_once(
            f"{reader.path}: {name_some(sorted(floats))} stay as they are: their rows "
            f"are no whole blocks of {BLOCK} weights"
        )
    if to == "hf":
        return Dequantised(reader, wanted) if kind or reader.dense_kind else reader
    if expert_dtype is None and dense is None:
        return reader  # blocks of a GGUF file among its weights are taken over
    return Quantised(reader, expert_dtype, dense)


def _say_rounded(reader: GgufReader, expert_dtype: str | None, dense: str | None):
    for what, was, new in (
        ("experts", reader.decoded_experts or reader.layout.kind, expert_dtype),
        ("dense weights", reader.quantised_dense, dense),
    ):
        if new is not None and was is not None and was != new:
            say_once(
                f"{reader.path}: {was} {what} are quantised again as {new}, which "
                "rounds them a second time"
            )


def _num_bytes(reader) -> int:
    """Of all weights as they will be written."""
    config, layout, total = reader.config, reader.layout, 0
    for item in dense_items(config):
        dtypes, kinds = reader.dense_dtypes(item), reader.dense_kinds(item)
        for name, shape in item_shapes(config, item).items():
            if name in kinds:
                total += shape[0] * row_bytes(kinds[name], shape[1])
            else:
                total += math.prod(shape) * dtypes[name].itemsize
    size = layout.num_values if layout.kind is None else layout.size
    records = len(config.moe_layers) * config.moe.num_experts
    return total + records * size * reader.dtype.itemsize


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
            kept = reader.layout.value_dtype(reader.dtype)
            dtypes |= dict.fromkeys(rules.expert_shapes(config, item), kept)
    return dtypes
