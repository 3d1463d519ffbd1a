"""What a conversion does to a checkpoint: how it is read, what the new one is."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.reader import CheckpointReader, DenseReader
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.convert.hf_files import converted_config, read_generation
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_config import refactored_hf_config
from moe_edge.convert.requantise import Dequantised
from moe_edge.convert.sinks import HfSink, OursSink
from moe_edge.convert.stream import content_sha256
from moe_edge.convert.weights import as_written, hf_dtypes
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import format_of


@dataclasses.dataclass(frozen=True)
class Work:
    """What becomes of a checkpoint.

    Attributes:
      source: as it is stored; reader: as it is written.
      config: of the new folder.
      manifest: of a refactored or pruned model, what the manifest says of that.
      is_changed: whether weights are other numbers than the source's.
      was: what weights were that are dequantised.
    """

    source: DenseReader
    reader: DenseReader
    config: ModelConfig
    manifest: dict[str, Any]
    is_changed: bool
    was: str | None

    def sink(self, folder: Path, to: str, shard_bytes: int) -> OursSink | HfSink:
        """What writes the new folder."""
        reader = self.reader
        if to == "hf":
            dtypes = hf_dtypes(reader)
            return HfSink(folder, self.config, reader, dtypes, shard_bytes)
        subs = reader.config.moe.sub_experts
        return OursSink(folder, self.config, reader, subs, **self.manifest)

    def check(self, digest: str) -> None:
        """Refuses a source of our format whose weights have not its hash.

        Args:
          digest: of what was written.
        """
        if not isinstance(self.source, CheckpointReader):
            return
        if not self.is_changed:
            check_digest(self.source, digest)
        elif self.source.checksums is None:
            # No CRC has vouched for what was read: read once more.
            check_digest(self.source)


def open_work(
    src: str | Path,
    to: str,
    wanted: np.dtype | None,
    expert_dtype: str | None,
    dense: str | None,
) -> Work:
    """Opens a checkpoint; the arguments are those of `as_written`.

    Raises:
      CheckpointError, ConfigError: a bad source, or one that has no such form.
    """
    source = open_checkpoint(src, wanted)
    reader = as_written(source, to, expert_dtype, dense, wanted)
    raw, manifest = reader.config.hf_config, {}
    generation = read_generation(reader.hf_files)
    if reader.config.moe.sub_experts > 1 and to == "ours":
        if expert_dtype is None:
            raise CheckpointError(
                f"{src} is refactored and in our format already; to change its dtype, "
                "convert the checkpoint it was made from and refactor that"
            )
        manifest["refactor"] = source.manifest["refactor"]
    elif reader.config.moe.sub_experts > 1:
        raw = refactored_hf_config(reader.config, generation)
    if isinstance(source, CheckpointReader) and source.manifest.get("pruned"):
        if to == "hf":
            raise CheckpointError(
                f"{src} is pruned, and Hugging Face has no such model; export the "
                "checkpoint it was made from"
            )
        manifest["pruned"] = source.manifest["pruned"]
    is_cast = wanted is not None or reader.quantized is not None
    is_dequantised = isinstance(reader, Dequantised)
    held = reader if is_dequantised else source
    was = format_of(reader.kind) if is_dequantised else None
    if isinstance(source, GgufReader) and expert_dtype is None:
        was = was or source.decoded_experts
    stated = wanted or held.layout.value_dtype(held.dtype)
    raw = converted_config(raw, stated.name, is_cast or is_dequantised)
    config = with_kind(
        config_from_hf(raw, generation), reader.layout.kind or reader.dtype.name
    )
    is_changed = is_cast or expert_dtype is not None
    return Work(source, reader, config, manifest, is_changed, was)


def check_digest(reader, digest: str | None = None) -> str:
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
