"""Writes a refactored checkpoint: our format, layer by layer.

The content hash is that of the model as an ordinary one (`convert/content_hash.py`):
over the Hugging Face tensors of a checkpoint with E U experts. So a refactored
checkpoint with a linear gate and its export have one hash; a proxy gate's own tensors
are hashed under the names that `convert/rules.py` gives them.
"""

import dataclasses
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
from moe_edge.convert.sinks import OursSink
from moe_edge.core.checks import OutputError
from moe_edge.core.files import atomic_folder, check_room
from moe_edge.core.progress import progress
from moe_edge.model.config import ModelConfig
from moe_edge.model.sub_experts import split_config
from moe_edge.refactor.gates.linear import repeat_router
from moe_edge.refactor.gates.proxy import Judges, gate_tensors
from moe_edge.refactor.split import down_factor, split_records

BAD_WEIGHTS = "a model with them cannot be split; get an undamaged checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refactoring:
    """What becomes of a model.

    Attributes:
      subs: U.
      labels: MoE layer -> `[E, F]`, sub-expert of every neuron, 0 the most important.
      gate: one of `model.config.GATES`.
      judges: of proxy gates: MoE layer -> gate neurons of its experts, stacked.
      rank_shares: of a proxy_pattern gate.
      origin: inactive, solver, seed, parent_sha256, profile, for the manifest.
    """

    subs: int
    labels: dict[int, np.ndarray]
    gate: str = "linear"
    judges: dict[int, Judges] = dataclasses.field(default_factory=dict)
    rank_shares: tuple[tuple[float, ...], ...] = ()
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def gate_neurons(self) -> int:
        """r, or 0 without a proxy gate."""
        return next((j.neurons_Ur.shape[-1] for j in self.judges.values()), 0)

    def config(self, parent: ModelConfig) -> ModelConfig:
        """The refactored model's config."""
        return split_config(
            parent,
            self.subs,
            gate=self.gate,
            gate_neurons=self.gate_neurons,
            rank_shares=self.rank_shares,
        )

    def manifest(self) -> dict[str, Any]:
        """The `refactor` object of the manifest."""
        shares = [list(row) for row in self.rank_shares]
        gate = {"gate": self.gate, "gate_neurons": self.gate_neurons}
        return gate | {"rank_shares": shares, "fine_tuned": None} | self.origin


def write_refactored(
    reader,
    refactoring: Refactoring,
    out_dir: str | Path,
    *,
    overwrite: bool = False,
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
    child = refactoring.config(reader.config)
    content = ContentHash(rules.hf_shapes(child))
    parent = reader.config
    if reader.quantized is not None:  # read, and now stored, unquantised
        raw = converted_config(parent.hf_config, reader.dtype.name, changed=True)
        parent = dataclasses.replace(parent, hf_config=raw)
    try:
        with atomic_folder(out_dir, overwrite) as folder:
            records = len(parent.moe_layers) * parent.moe.num_experts
            size = reader.layout.size * reader.dtype.itemsize
            check_room(folder, records * size)
            made = refactoring.subs, refactoring.manifest()
            sink = OursSink(folder, parent, reader, *made)
            try:
                for item in progress(dense_items(child), "layers written"):
                    arrays = reader.dense(item)
                    if item in child.moe_layers:
                        gate = _write_experts(
                            reader, refactoring, child, item, sink, content
                        )
                        if refactoring.gate == "linear":
                            arrays = repeat_router(arrays, refactoring.subs)
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


def check_records(reader, layer: int, first: int, records_NR: np.ndarray) -> None:
    """Raises CheckpointError if expert records that were read are not finite."""
    if not all_finite(records_NR):
        for piece in rules.records_to_hf(reader.config, layer, first, records_NR):
            check_finite(piece, BAD_WEIGHTS)


def _write_experts(
    reader, refactoring: Refactoring, child, layer: int, sink, content: ContentHash
) -> dict[str, np.ndarray]:
    """Splits a layer's experts; returns the dense tensors of a proxy gate."""
    labels_EF, U = refactoring.labels[layer], refactoring.subs
    E, layout = reader.config.moe.num_experts, reader.layout
    factor = down_factor(reader.config.moe, U, refactoring.gate)
    step = chunk_rows(layout, reader.dtype.itemsize, E)
    buffer = np.empty((step, layout.size), reader.dtype)
    judges, gate = refactoring.judges.get(layer), []
    for first in range(0, E, step):
        part = slice(first, min(first + step, E))
        records = buffer[: part.stop - first]
        reader.read_experts(layer, first, records)
        check_records(reader, layer, first, records)
        blocks = split_records(records, labels_EF[part], layout, U, factor)
        for piece in rules.records_to_hf(child, layer, first * U, blocks):
            content.add(piece)
        sink.experts(layer, first * U, blocks)
        if judges is not None:
            some = Judges(*(array[part] for array in judges))
            gate.append(gate_tensors(records, layout, some))
        reader.release()
    names = gate[0] if gate else ()
    return {name: np.concatenate([g[name] for g in gate]) for name in names}
