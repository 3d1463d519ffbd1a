"""Whether a checkpoint will load, and how large it is, without reading weights.

A Hugging Face folder is judged by its config.json and by the names, shapes and dtypes
in the headers of its files. Where files are not there, the index gives names; where
that is not there either, the config alone gives sizes.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import KEEP_FLOAT32, RECORD_DTYPES
from moe_edge.checkpoint.manifest import TOKENIZER_NAME, with_kind
from moe_edge.checkpoint.schema import (
    Differences,
    dense_items,
    differences,
    item_shapes,
    name_some,
)
from moe_edge.convert import rules
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.hf_files import CONFIG_NAME, read_generation
from moe_edge.convert.hf_reader import expert_dtype
from moe_edge.convert.open import find_checkpoint, open_checkpoint
from moe_edge.convert.quantize import quantization
from moe_edge.convert.requantise import is_encoded
from moe_edge.convert.safetensors_reader import INDEX_NAME, open_folder
from moe_edge.convert.tensor_source import TensorSource
from moe_edge.core.checks import CheckpointError, ConfigError, MoeEdgeError
from moe_edge.core.heap import collector_paused
from moe_edge.core.json_reader import read_json
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import DENSE_KINDS, KINDS, row_bytes
from moe_edge.model.record import RecordLayout

_DENSE = ("bfloat16", "float32")
_ALL = "names and shapes"
_NAMES = 8  # of tensors that are listed


class DoesNotLoad(CheckpointError):
    """A checkpoint that was checked and will not load.

    Attributes:
      summary: what the command prints as its JSON line nevertheless.
    """

    def __init__(self, message: str, summary: dict[str, Any]):
        super().__init__(message)
        self.summary = summary


@dataclasses.dataclass
class Check:
    """What is known of a checkpoint.

    Attributes:
      path, kind: as `find_checkpoint` says.
      reasons: why it does not load; empty: it does, as far as it was checked.
      config: the model; None: its config.json is refused.
      quantized: how its weights are stored, see `quantize.Scheme.method`.
      has_tokenizer: whether prompts can be texts.
      tensors: how many weights were found; None: they were not looked for.
      absent: how many tensors the index names in files that are not there.
      unused: name of a tensor that the model does not use -> why.
      differences: of the tensors and what the config asks for.
    """

    path: Path
    kind: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    config: ModelConfig | None = None
    quantized: str | None = None
    has_tokenizer: bool = False
    tensors: int | None = None
    absent: int = 0
    unused: dict[str, str] = dataclasses.field(default_factory=dict)
    differences: Differences = Differences([], [], [])

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """An error inside becomes a reason."""
        try:
            yield
        except MoeEdgeError as error:
            self.reasons.append(str(error))

    @property
    def checked(self) -> str:
        """What of the tensors was compared with the config."""
        if self.tensors is None:
            return "nothing"
        return "names" if self.absent else _ALL


def check_checkpoint(src: str | Path, dtype: np.dtype | None = None) -> Check:
    """Checks a checkpoint of any format as far as loading it does without weights.

    Args:
      src: see `find_checkpoint`.
      dtype: that its weights are to be cast to; None: as stored.
    Raises:
      CheckpointError: `src` is no checkpoint.
    """
    kind, path = find_checkpoint(src)
    check = Check(path, kind)
    if kind == "Hugging Face folder":
        _check_folder(check, dtype)
        return check
    with check.collecting():
        reader = open_checkpoint(path, dtype)
        check.config, check.quantized = reader.config, reader.quantized
        check.has_tokenizer = reader.tokenizer_path is not None
        why = "the model does not use them"
        check.unused = dict.fromkeys(reader.dropped, why)
        check.tensors = len(rules.hf_shapes(reader.config))
    return check


@collector_paused()
def _check_folder(check: Check, dtype: np.dtype | None) -> None:
    """Fills in what is known of a Hugging Face folder."""
    folder, raw, files = check.path, None, None
    check.has_tokenizer = (folder / TOKENIZER_NAME).is_file()
    with check.collecting():
        raw = read_json(folder / CONFIG_NAME, CheckpointError, strict=False)
    if raw is not None:
        with check.collecting():
            check.config = config_from_hf(raw, read_generation(folder))
            raw = check.config.hf_config
    if isinstance(raw, dict):
        with check.collecting():
            scheme = quantization(raw)
            check.quantized = None if scheme is None else scheme.method
    is_known = not check.reasons
    if _has_weights(folder):
        with check.collecting():
            files = open_folder(folder, partly=True)
            check.absent = sum(file is None for file in files.values())
    if files is None or not is_known:
        return
    with check.collecting():
        source = TensorSource(folder, check.config, dtype, files)
        check.unused, check.tensors = source.unused, len(source.shapes)
        expected = rules.hf_shapes(check.config, source.shapes)
        check.differences = differences(source.shapes, expected)
        with check.collecting():
            check.differences.check(str(folder))
        with check.collecting():
            source.check_dtypes()
        if not check.differences.missing:
            expert_dtype(folder, check.config, source)


def _has_weights(folder: Path) -> bool:
    """Whether there is anything that should hold weights, also what we never read."""
    endings = (".safetensors", ".bin", ".pt", ".pth", INDEX_NAME)
    return any(path.name.endswith(endings) for path in folder.iterdir())


def sizes(config: ModelConfig) -> dict[str, dict[str, int | None]]:
    """Bytes of a model in each format that it can be converted to.

    Returns:
      expert: format -> of one expert; None: its blocks do not fill the sizes;
      experts: of all; dense: of everything else, where q8_0 and q4_0 are of matrices
        and the rest is counted as bfloat16.
    """
    one: dict[str, int | None] = {}
    for kind in (*_DENSE, *KINDS):
        try:
            layout = RecordLayout.of(with_kind(config, kind))
            one[kind] = layout.num_bytes(RECORD_DTYPES[kind])
        except ConfigError:
            one[kind] = None
    count = len(config.moe_layers) * config.moe.num_experts
    dense: dict[str, int | None] = dict.fromkeys((*_DENSE, *DENSE_KINDS), 0)
    for item in dense_items(config):
        for name, shape in item_shapes(config, item).items():
            for kind in dense:
                if kind in DENSE_KINDS and is_encoded(config, name, shape):
                    dense[kind] += shape[0] * row_bytes(kind, shape[1])
                    continue
                stays = kind if kind in _DENSE else "bfloat16"
                stays = "float32" if name in KEEP_FLOAT32 else stays
                dense[kind] += math.prod(shape) * RECORD_DTYPES[stays].itemsize
    dense |= {kind: None for kind in DENSE_KINDS if one[kind] is None}
    total = {kind: None if size is None else count * size for kind, size in one.items()}
    return {"expert": one, "experts": total, "dense": dense}


def summary(check: Check) -> dict[str, Any]:
    """What a check found, for programs."""
    facts: dict[str, Any] = {
        "loads": not check.reasons,
        "reasons": check.reasons,
        "quantized": check.quantized,
        "tokenizer": check.has_tokenizer,
        "checked": check.checked,
        "tensors": check.tensors,
        "absent_tensors": check.absent,
        **{
            name: {"tensors": len(found), "names": found[:_NAMES]}
            for name, found in check.differences._asdict().items()
        },
        "dropped": [
            {"why": why, "tensors": len(names), "names": names[:_NAMES]}
            for why, names in _by_reason(check).items()
        ],
    }
    config = check.config
    if config is not None:
        facts |= {
            "model_type": config.model_type,
            "layers": config.num_layers,
            "moe_layers": len(config.moe_layers),
            "experts": config.moe.num_experts,
            "top_k": config.moe.top_k,
            "max_positions": config.max_positions,
            "positions_end": config.positions_end or None,
            **{f"{part}_bytes": size for part, size in sizes(config).items()},
        }
    return facts


def _by_reason(check: Check) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in check.unused.items():
        found.setdefault(why, []).append(name)
    return found


def lines(check: Check) -> Iterator[str]:
    """What a check found, for people."""
    config = check.config
    of = "" if config is None else f" of {config.model_type}"
    stored = f", {check.quantized}" if check.quantized else ""
    yield f"{check.path}: {check.kind}{of}{stored}"
    if config is not None:
        moe = config.moe
        yield (
            f"{config.num_layers} layers, {len(config.moe_layers)} with "
            f"{moe.num_experts:,} experts, of which a token takes {moe.top_k}"
            + (" and a shared one" if moe.shared_dim else "")
        )
        yield f"tokens of a context: {config.context_words}"
        yield f"{'':10}{'an expert':>12}{'all experts':>14}{'all else':>12}"
        size = sizes(config)
        for kind, one in size["expert"].items():
            cells = _size(one), _size(size["experts"][kind]), size["dense"].get(kind)
            yield f"{kind:10}{cells[0]:>12}{cells[1]:>14}{_size(cells[2]):>12}"
    if check.tensors is None:
        yield "tensors: not checked"
    else:
        where = f"; {check.absent:,} are in files that are not here"
        yield (
            f"tensors: {check.tensors:,} weights, {check.checked} checked"
            f"{where if check.absent else ''}"
        )
    if not check.has_tokenizer:
        yield "no tokenizer.json: prompts can be token ids alone"
    for why, names in _by_reason(check).items():
        yield f"left out, {len(names):,} tensors, {why}: {name_some(names)}"
    for reason in check.reasons:
        yield f"does not load: {reason}"
    if not check.reasons:
        yield "loads" if check.checked == _ALL else "loads, as far as it was checked"


def _size(num_bytes: int | None) -> str:
    """Three digits and a unit of 1000."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
