"""Writes a refactored checkpoint: our format, layer by layer.

The content hash is that of the model as an ordinary one (`convert/content_hash.py`):
over the Hugging Face tensors of a checkpoint with E U experts. So a refactored
checkpoint with a linear gate and its export have one hash; a proxy gate's own tensors
are hashed under the names that `convert/rules.py` gives them.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import all_finite
from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert import rules
from moe_edge.convert.content_hash import (
    ContentHash,
    check_finite,
    chunk_rows,
    dense_pieces,
)
from moe_edge.convert.hf_files import converted_config
from moe_edge.convert.refactored_records import down_factor, split_records
from moe_edge.convert.refactored_router import (
    Judges,
    LevelRows,
    gate_tensors,
    level_tensors,
    repeat_router,
)
from moe_edge.convert.sinks import OursSink
from moe_edge.core.checks import OutputError
from moe_edge.core.files import check_room
from moe_edge.core.out_folder import atomic_folder
from moe_edge.core.progress import progress
from moe_edge.model.config import ModelConfig

BAD_WEIGHTS = "a model with them cannot be split; get an undamaged checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refactoring:
    """What becomes of a model.

    Attributes:
      config: of the refactored model.
      labels: MoE layer -> `[E, F]`, sub-expert of every neuron, 0 the most important.
      judges: of proxy gates: MoE layer -> gate neurons of its experts, stacked.
      rows: of calibrated gates: MoE layer -> rows of each expert's blocks.
      origin: inactive, solver, seed, parent_sha256, profile, for the manifest.
    """

    config: ModelConfig
    labels: dict[int, np.ndarray]
    judges: dict[int, Judges] = dataclasses.field(default_factory=dict)
    rows: dict[int, list[LevelRows]] = dataclasses.field(default_factory=dict)
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        """The `refactor` object of the manifest."""
        moe = self.config.moe
        shares = [list(row) for row in moe.rank_shares]
        gate = {"gate": moe.gate, "gate_neurons": moe.gate_neurons}
        return gate | {"rank_shares": shares, "fine_tuned": None} | self.origin


def write_refactored(
    reader, refactoring: Refactoring, out_dir: str | Path, overwrite: bool = False
) -> str:
    """Writes the refactored model; nothing appears before everything is there.

    Args:
      reader: the parent, of either format.
      refactoring: how it is split.
      out_dir: the new folder.
      overwrite: replace an earlier checkpoint.
    Returns:
      the content hash.
    Raises:
      CheckpointError: weights that are not finite, or overflow once scaled;
      OutputError: the folder.
    """
    child, U = refactoring.config, refactoring.config.moe.sub_experts
    content = ContentHash(rules.hf_shapes(child))
    parent = reader.config
    if reader.quantized is not None:  # read, and now stored, unquantised
        raw = converted_config(parent.hf_config, reader.dtype.name, changed=True)
        parent = dataclasses.replace(parent, hf_config=raw)
    try:
        with atomic_folder(out_dir, overwrite) as folder:
            records = len(parent.moe_layers) * parent.moe.num_experts
            size = reader.layout.num_bytes(reader.dtype)
            check_room(folder, records * size)
            sink = OursSink(folder, parent, reader, U, refactoring.manifest())
            try:
                for item in progress(dense_items(child), "layers written"):
                    arrays = reader.dense(item)
                    if item in child.moe_layers:
                        gate = _write_experts(reader, refactoring, item, sink, content)
                        if child.moe.gate == "linear":
                            arrays = repeat_router(arrays, U, child.moe.scoring)
                        if child.moe.gate == "calibrated":
                            rows = refactoring.rows[item]
                            gate = level_tensors(rows, reader.dtype)
                        arrays = arrays | gate
                    for piece in dense_pieces(child, item, arrays):
                        check_finite(piece, BAD_WEIGHTS)
                        content.add(piece)
                    sink.dense(item, arrays)
                    reader.release()
                digest = content.hexdigest()
                sink.finish(digest)
            finally:
                sink.close()
    except OSError as error:
        raise OutputError(f"writing {out_dir} failed: {error}") from error
    return digest


def read_records(reader, layer: int) -> Iterator[tuple[slice, np.ndarray]]:
    """A layer's experts, some at a time: which, and their records in one buffer.

    Raises:
      CheckpointError: records that are not finite.
    """
    E = reader.config.moe.num_experts
    step = chunk_rows(reader, E)
    buffer = np.empty((step, reader.layout.size), reader.dtype)
    for first in range(0, E, step):
        records = buffer[: min(step, E - first)]
        reader.read_experts(layer, first, records)
        if not all_finite(records):
            for piece in rules.records_to_hf(reader.config, layer, first, records):
                check_finite(piece, BAD_WEIGHTS)
        yield slice(first, first + len(records)), records
        reader.release()


def _write_experts(
    reader, refactoring: Refactoring, layer: int, sink, content: ContentHash
) -> dict[str, np.ndarray]:
    """Splits a layer's experts; returns the dense tensors of a proxy gate."""
    child, labels_EF = refactoring.config, refactoring.labels[layer]
    U = child.moe.sub_experts
    factor = down_factor(reader.config.moe, U, child.moe.gate)
    judges, gate = refactoring.judges.get(layer), []
    for part, records in read_records(reader, layer):
        blocks = split_records(records, labels_EF[part], reader.layout, U, factor)
        for piece in rules.records_to_hf(child, layer, part.start * U, blocks):
            content.add(piece)
        sink.experts(layer, part.start * U, blocks)
        if judges is not None:
            some = Judges(*(array[part] for array in judges))
            gate.append(gate_tensors(records, reader.layout, some))
    names = gate[0] if gate else ()
    return {name: np.concatenate([g[name] for g in gate]) for name in names}
