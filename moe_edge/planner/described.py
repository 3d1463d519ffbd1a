"""A model that is known by its config alone: exact bytes, no weights."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.schema import item_shapes
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.hf_files import read_generation
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError, check_known
from moe_edge.core.context import Context
from moe_edge.core.files import check_there
from moe_edge.core.json_reader import read_json
from moe_edge.engine.device_needs import DeviceNeeds, device_needs
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_context import context_of
from moe_edge.engine.weights import weight_shapes
from moe_edge.hardware.specs import Gpu
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.model.sub_experts import at_k
from moe_edge.offload.store import device_dtype

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class Described:
    """Stands for an open checkpoint where only its sizes are asked for.

    Args:
      config: of the model.
      dtype: of its weights as stored.
      batch, context: rows that decode together, and their tokens.
      machine_bytes: memory of the device; backend: JAX's name of its kind.
      kind: of blocks that the experts are quantised to; None: they are as stored.
      reader: of the checkpoint, which knows the dtypes of all else; None: they are
        `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        batch: int,
        context: int,
        machine_bytes: int | None,
        backend: str,
        kind: str | None = None,
        reader: Any = None,
    ):
        self.config = with_kind(config, kind) if kind is not None else config
        self.dense_dtype, self._reader = dtype, reader
        quantised = self.config.moe.expert_kind is not None
        self.dtype = np.dtype(np.uint8) if quantised else dtype
        self.layout = RecordLayout.of(self.config)
        self.batch, self._context = batch, context
        self.machine_bytes, self._backend = machine_bytes, backend
        self._weights = weight_shapes(self)

    def dense_dtypes(self, item) -> dict[str, np.dtype]:
        """As of a reader."""
        if self._reader is not None:
            return self._reader.dense_dtypes(item)
        return dict.fromkeys(item_shapes(self.config, item), self.dense_dtype)

    def dense_kinds(self, item) -> dict[str, str]:
        """As of a reader: of a config alone no dense weight is quantised."""
        return {} if self._reader is None else self._reader.dense_kinds(item)

    @property
    def block_bytes(self) -> int:
        return self.layout.num_bytes(device_dtype(self.dtype))

    @property
    def dense_bytes(self) -> int:
        return self._weights.num_bytes

    def needs(self, options: OffloadOptions) -> DeviceNeeds:
        """What an engine of these options holds besides slots."""
        shape = self.config.moe.num_experts, self.layout.size
        records = jax.ShapeDtypeStruct(shape, device_dtype(self.dtype))
        room = self.batch, self._context
        return device_needs(options, self._weights, records, *room, self._backend)

    def decides_on_device(self, options: OffloadOptions) -> bool:
        """Whether an engine of these options is of mode fused."""
        return options.choose_mode(self._backend) == "fused"

    def context(self, options: OffloadOptions) -> Context:
        """What an engine of these options gives to policies."""
        return context_of(options, self.config)


def read_config(path: str) -> tuple[ModelConfig, np.dtype]:
    """A config.json and the dtype that it names.

    Raises:
      ConfigError: no config.json of a model that is implemented, or one of quantised
        weights, whose bytes stand in the files alone.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    check_there(file, "--config_json")
    raw: Any = read_json(file, CheckpointError, strict=False)
    config = config_from_hf(raw, read_generation(file.parent))
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else {}
    for part in (raw, text):
        if part.get("quantization_config"):
            raise ConfigError(
                f"{file} has a quantization_config: how many bytes its weights have "
                "only the files say; plan with --checkpoint"
            )
    named = [part.get(key) for part in (raw, text) for key in ("dtype", "torch_dtype")]
    name = str(next((each for each in named if each), "float32"))
    check_known(f"dtype of {file}", name, DTYPES)
    return config, DTYPES[name]


def backend_of(gpu: Gpu) -> str:
    """JAX's name of a machine's kind."""
    return "cpu" if "measured: cpu" in gpu.device.source else "gpu"


class DescribedModel:
    """A plan's model in every format and at every K, on any machine.

    Args:
      asked: `PlanOptions`: a config or a checkpoint, rows and their tokens.
    """

    def __init__(self, asked: Any):
        self._asked, self._reader = asked, None
        if asked.config_json is not None:
            self.config, self._dtype = read_config(asked.config_json)
        else:
            self._reader = open_checkpoint(asked.checkpoint or "default")
            self.config, self._dtype = self._reader.config, self._reader.dtype

    def __call__(
        self, gpu: Gpu, k: int | None = None, kind: str | None = None
    ) -> Described:
        config = at_k(self.config, k).with_cache(self._asked.kv_cache)
        room = self._asked.batch, self._asked.tokens, gpu.device.memory_bytes
        given = config, self._dtype, *room, backend_of(gpu), kind, self._reader
        return Described(*given)
