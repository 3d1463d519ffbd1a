"""A GGUF file as a checkpoint: config, dense tensors, expert records, tokenizer.

Float types stay as they are. Where the matrices of all experts are of one quantised
type, their blocks become quantised records, byte for byte; so do dense matrices of
these types, each by itself. Other quantised weights are decoded exactly: MXFP4 to
bfloat16, all others to float32.
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.dtypes import KEEP_FLOAT32, cast
from moe_edge.checkpoint.manifest import TOKENIZER_NAME, with_kind
from moe_edge.checkpoint.reader import DenseReader
from moe_edge.checkpoint.schema import Item, check_tensors, dense_items
from moe_edge.convert import gguf_names, gguf_states
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.gguf_blocks import KINDS, decode, is_quantised
from moe_edge.convert.gguf_config import architecture, hf_config
from moe_edge.convert.gguf_metadata import ADVICE
from moe_edge.convert.gguf_parts import ROPE_FACTORS
from moe_edge.convert.gguf_split import open_gguf
from moe_edge.convert.gguf_tokenizer import check_tokenizer, tokenizer_files
from moe_edge.convert.hf_files import dump_json
from moe_edge.convert.hf_tensors import check_frequencies
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.quantised import BLOCK, Matrix
from moe_edge.model.quantised import KINDS as KINDS_OF_RECORDS
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import may_be_blocks

_FLOAT32 = np.dtype(np.float32)


class GgufReader(DenseReader):
    """Reads a GGUF file without converting it; of a model in parts, the first.

    Names, shapes and types of all tensors are checked at construction; weights are read
    when they are asked for.

    Attributes:
      config, dtype, layout, dropped: as `HfReader`'s.
    """

    def __init__(self, path: str | Path, dtype: np.dtype | None = None):
        self.path = Path(path).resolve()
        # By its own name: in a cache the file may be a link to one of another name.
        self._file, self._cast = open_gguf(Path(path)), dtype
        check_tokenizer(self._file)
        _, self._entry = architecture(self._file)
        raw, needed = hf_config(self._file)
        try:
            self.config = config_from_hf(raw)
        except ConfigError as error:
            raise ConfigError(f"metadata of {path} as a {error}") from error
        found = {name: t.shape for name, t in self._file.tensors.items()}
        layers = self.config.num_layers
        self.dropped = [
            name
            for name in found
            if gguf_names.is_unused(name, layers, found) and name not in needed
        ]
        for name in self.dropped:
            if name.endswith(gguf_names.FREQUENCIES):
                check_frequencies(path, name, self._file.read(name), self.config)
            if name == ROPE_FACTORS and (self._file.read(name) != 1).any():
                raise ConfigError(
                    f"{path}: {name} divides rotary frequencies, expected ones, or no "
                    f"such tensor, in models of {self.config.model_type}; {ADVICE}"
                )
        expected = gguf_names.all_shapes(self.config, self._entry, found)
        check_tensors(
            str(path),
            {
                name: gguf_names.squeezed(shape)
                for name, shape in found.items()
                if name not in self.dropped and name not in needed
            },
            {name: gguf_names.squeezed(shape) for name, shape in expected.items()},
        )
        kind = self._expert_kind() if dtype is None else None
        if kind is not None:
            self.config = with_kind(self.config, kind)
        self.layout = RecordLayout.of(self.config)
        self.dtype = np.dtype(np.uint8 if kind else dtype or self._expert_dtype())
        raw["dtype"] = self.layout.value_dtype(self.dtype).name

    def _experts(self, layer: int) -> dict[str, gguf_names.Stacked]:
        return gguf_names.expert_names(self.config, layer, self._file.tensors)

    def _stored(self, name: str) -> np.dtype:
        return KINDS[self._file.tensors[name].kind].dtype

    def _expert_kind(self) -> str | None:
        """The format of quantised records that the experts' blocks are, if they are."""
        kinds = {
            (len(shape), self._file.tensors[names[part].name].kind.lower())
            for names in map(self._experts, self.config.moe_layers)
            for part, shape in RecordLayout.of(self.config).shapes.items()
        }
        found = next((k for k in KINDS_OF_RECORDS if (2, k) in kinds), None)
        return found if kinds <= {(2, found), (1, "f32")} else None

    def _expert_dtype(self) -> np.dtype:
        """One dtype that holds every routed expert exactly.

        Biases are float32 in all files; if they fit in the matrices' dtype (those of
        gpt-oss, trained in bfloat16, do), records need not grow for them.
        """
        layers = self.config.moe_layers
        if not layers:
            raise CheckpointError(
                f"{self.path}: every layer is dense; expected at least one MoE layer"
            )
        names = [
            (part, stacked.name)
            for layer in layers
            for part, stacked in self._experts(layer).items()
        ]
        matrices = {self._stored(n) for part, n in names if "bias" not in part}
        if len(matrices) > 1:
            return _FLOAT32
        (dtype,) = matrices
        for part, name in names:
            if "bias" in part and self._stored(name) != dtype:
                values = self._file.read(name).astype(_FLOAT32)
                if np.any(cast(values, dtype).astype(_FLOAT32) != values):
                    return _FLOAT32
        return dtype

    @property
    def quantised_dense(self) -> str | None:
        """The quantised types of dense weights in the file; None: none are."""
        experts = [n for i in self.config.moe_layers for n in self._experts(i).values()]
        names = {*self._file.tensors} - {stacked.name for stacked in experts}
        return self._quantised_of(names - {*self.dropped})

    @functools.cached_property
    def dense_kind(self) -> str | None:
        kinds = {
            kind
            for item in dense_items(self.config)
            for kind in self.dense_kinds(item).values()
        }
        return "+".join(sorted(kinds)) or None

    @property
    def quantized(self) -> str | None:
        """The quantised types in the file, such as "q4_k+q6_k"; None: none."""
        return self._quantised_of(self._file.tensors)

    @property
    def decoded_experts(self) -> str | None:
        """The quantised types of experts that are read as numbers; None: none are."""
        if self.layout.kind is not None:
            return None
        names = map(self._experts, self.config.moe_layers)
        return self._quantised_of(n.name for each in names for n in each.values())

    def _quantised_of(self, names: Iterable[str]) -> str | None:
        kinds = {self._file.tensors[name].kind for name in names}
        return "+".join(sorted(k.lower() for k in kinds if is_quantised(k))) or None

    @functools.cached_property
    def hf_files(self) -> Path:
        """A folder of this process with the tokenizer as Hugging Face stores it."""
        folder = Path(tempfile.mkdtemp(prefix="moe_edge_gguf_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in tokenizer_files(self._file).items():
            dump_json(folder / name, content)
        return folder

    @property
    def tokenizer_path(self) -> Path | None:
        path = self.hf_files / TOKENIZER_NAME
        return path if path.is_file() else None

    @property
    def hf_source(self) -> str | None:
        return str(self.path)

    def _dense(self, item: Item):
        """(canonical name, what it is made of, dtype as returned) of one item."""
        found = gguf_names.dense_sources(
            self.config, self._entry, item, self._file.tensors
        )
        for name, sources in found.items():
            dtypes = {self._stored(source.name) for source in sources}
            dtype = dtypes.pop() if len(dtypes) == 1 else _FLOAT32
            keeps = name in KEEP_FLOAT32 and dtype == _FLOAT32
            yield name, sources, dtype if self._cast is None or keeps else self._cast

    def _read(self, source: gguf_names.Source) -> np.ndarray:
        if source.shape == source.whole:  # axes of length one may be left out
            return self._file.read(source.name).reshape(source.shape)
        return self._file.read(source.name, source.first, source.shape[0])

    def dense_kinds(self, item: Item) -> dict[str, str]:
        if self._cast is not None:
            return {}
        found = gguf_names.dense_sources(
            self.config, self._entry, item, self._file.tensors
        )
        return {
            name: kind
            for name, (source, *others) in found.items()
            if (kind := self._file.tensors[source.name].kind.lower())
            in KINDS_OF_RECORDS
            and not others
            and len(source.shape) == 2
            and may_be_blocks(name, source.shape, BLOCK)
            and not gguf_states.parts_blocks(self.config, name)
        }

    def _read_blocks(self, name: str, source: gguf_names.Source, kind: str) -> Matrix:
        """A dense matrix as the file has it: rows are whole blocks."""
        raw = self._file.read_raw(source.name, source.first, source.shape[0])
        rows = raw.reshape(source.shape[0], -1)
        return Matrix(kind, gguf_names.restore(self.config, self._entry, name, [rows]))

    def dense(self, item: Item) -> dict[str, np.ndarray | Matrix]:
        """Canonical name -> array of one item."""
        arrays, kinds = {}, self.dense_kinds(item)
        for name, sources, dtype in self._dense(item):
            if name in kinds:
                arrays[name] = self._read_blocks(name, sources[0], kinds[name])
                continue
            parts = [cast(self._read(source), dtype) for source in sources]
            restored = gguf_names.restore(self.config, self._entry, name, parts)
            arrays[name] = np.ascontiguousarray(restored)
        return arrays

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        """Canonical name -> dtype of what `dense` returns; float32 of blocks."""
        in_blocks = dict.fromkeys(self.dense_kinds(item), _FLOAT32)
        return {name: dtype for name, _, dtype in self._dense(item)} | in_blocks

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with the records of experts first, first + 1, ..."""
        out_NR[:, self.layout.num_values :] = 0
        for part, (name, pieces, piece) in self._experts(layer).items():
            kind = self._file.tensors[name].kind
            plain = self._stored(name) == out_NR.dtype and not is_quantised(kind)
            for i, out_R in enumerate(out_NR):
                which = (first + i) * pieces + piece
                if self.layout.kind is not None:
                    start = self.layout.offsets[part]
                    stop = start + self.layout.count(self.layout.shapes[part])
                    self._file.read_into(name, which, out_R[start:stop], pieces)
                    continue
                out = self.layout.part(out_R, part)
                if plain:
                    self._file.read_into(name, which, out, pieces)
                else:
                    values = decode(kind, self._file.read_raw(name, which, 1, pieces))
                    np.copyto(out, cast(values, out.dtype).reshape(out.shape))

    def release(self) -> None:
        """Nothing is kept between calls."""

    def content_sha256(self) -> str:
        """Reads the whole file once; see content_hash.py."""
        from moe_edge.convert.stream import content_sha256

        return content_sha256(self)
