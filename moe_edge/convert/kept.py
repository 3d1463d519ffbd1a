"""A Hugging Face folder whose experts are read as blocks, as they are stored.

FP8 of DeepSeek-V3 and those after it becomes kind fp8, packed INT4 of
compressed-tensors (Kimi-K2) kind int4 (`model/quantised.py`): codes and scales keep
their bits, only their order changes, and the scale of several rows stands in each.
"""

import numpy as np

from moe_edge.convert import rules
from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.requantise import Instead
from moe_edge.core.checks import CheckpointError


class Kept(Instead):
    """Such a folder.

    Args:
      reader: of the folder.
      kind: of the experts, one of `quantised.KEPT_KINDS`.
    Raises:
      ConfigError: D or F that the kind's blocks do not fill.
      CheckpointError: experts that are stored in another way; the first of them and
        what about it.
    """

    def __init__(self, reader, kind: str):
        if not isinstance(reader, HfReader):
            raise _refusal(reader, kind, "it is no Hugging Face folder")
        super().__init__(reader, kind, np.dtype(np.uint8))
        if rules.family(self.config).fused in ("columns", "turned"):
            raise _refusal(reader, kind, "its experts stand as [in, out]")
        for layer in self.config.moe_layers:
            for name in rules.expert_shapes(self.config, layer, reader.source.shapes):
                if reason := reader.source.why_not_kept(name, kind):
                    raise _refusal(reader, kind, f"{name}: {reason}")

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        layout, source = self.layout, self._inner.source
        fused = list(rules.fused_shapes(self.config, layer))
        out_NR[:, layout.num_values :] = 0
        for expert, out_R in enumerate(out_NR, first):
            if fused[0] in source.shapes:
                stored = [source.blocks(name, layout.kind, expert) for name in fused]
                parts = rules.split_fused(self.config, stored)
            else:
                of = rules.expert_names(self.config, layer, expert)
                parts = {p: source.blocks(n, layout.kind) for p, n in of.items()}
            for part, rows in parts.items():
                start = layout.offsets[part]
                out_R[start : start + rows.size] = rows.reshape(-1)


def _refusal(reader, kind: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{reader.path}: {kind} experts are taken over as stored, never rounded to, "
        f"but {reason}; leave out --expert_dtype {kind}, or take q8_0, q4_0 or mxfp4"
    )
