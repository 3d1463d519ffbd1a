"""Where expert blocks live while they are not on the device: host memory or disk."""

import ctypes

import jax
import ml_dtypes
import numpy as np

from moe_edge.checkpoint.dtypes import RECORD_DTYPES
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.progress import progress

MEMORIES = ("host", "pinned", "mmap")


def device_dtype(stored: np.dtype) -> np.dtype:
    """The dtype in which records of a checkpoint are kept on this backend.

    The one rule for experts and dense matrices: bfloat16 on a CPU as its uint16 bits,
    float16 widened (exact; no kernel reads it), everything else as stored.
    """
    if stored == ml_dtypes.bfloat16 and jax.default_backend() == "cpu":
        return np.dtype(np.uint16)
    return widened(stored)


def widened(stored: np.dtype) -> np.dtype:
    """`device_dtype`, as wide, without a backend."""
    return np.dtype(np.float32 if stored == np.float16 else stored)


class HostStore:
    """The records of every MoE layer.

    A block is a whole expert, or a sub-expert of a refactored checkpoint: `expert`
    counts blocks (parent * U + sub).

    Attributes:
      dtype: of the records, as programs take them.
      record_size, block_bytes: R elements of a record, and their bytes.
      num_experts, subs: E blocks of a layer, U blocks of a parent expert.
      moe_layers: the layers that have blocks.
    """

    def __init__(self, reader, memory: str = "host"):
        """Loads or maps all layers.

        Loading goes layer by layer, straight into the final arrays, so the peak is
        the records themselves plus one layer at most (float16 doubles in widening).

        Args:
          reader: an open checkpoint (`convert.open.open_checkpoint`).
          memory: "host" copies every record; "pinned" does so into memory that a GPU
            reads directly; "mmap" maps the checkpoint's record files: reading a
            record is reading the disk (or the kernel's page cache), and records are
            not checked for damage as the copies are.
        Raises:
          ConfigError: unknown memory, or "mmap" of a checkpoint whose file does not
            hold the records as programs take them.
        """
        check_known("expert memory", memory, MEMORIES)
        if memory == "mmap":
            check_mappable(reader)
        self.memory = memory
        self.dtype = device_dtype(reader.dtype)
        self.subs = reader.config.moe.sub_experts
        self.num_experts = reader.config.moe.num_experts
        self.record_size = reader.layout.size
        self.moe_layers = tuple(reader.config.moe_layers)
        self._pinned: dict[tuple[int, int], jax.Array] = {}
        self._layers: dict[int, jax.Array] = {}
        self._records = {
            layer: self._load(reader, layer)
            for layer in progress(self.moe_layers, "layers of experts loaded")
        }
        self.block_bytes = reader.layout.num_bytes(self.dtype)

    def _load(self, reader, layer: int) -> np.ndarray | list[np.ndarray]:
        if self.memory == "mmap":
            return np.asarray(reader.map_experts(layer)).view(self.dtype)
        records = np.empty((self.num_experts, self.record_size), self.dtype)
        same_bits = self.dtype.itemsize == reader.dtype.itemsize
        target = records.view(reader.dtype) if same_bits else records
        reader.read_experts(layer, 0, target)
        reader.release()
        if self.memory == "pinned":
            return [self._pin(layer, e, record) for e, record in enumerate(records)]
        records.flags.writeable = False
        return records

    def _pin(self, layer: int, expert: int, record_R: np.ndarray) -> np.ndarray:
        """Keeps a pinned copy as a jax array; returns a NumPy view of its memory."""
        pinned = jax.device_put(record_R, host_sharding(), may_alias=False)
        pinned.block_until_ready()
        if pinned.unsafe_buffer_pointer() == record_R.ctypes.data:
            pinned = pinned.copy()  # a CPU aliases all the same; the source goes away
        self._pinned[layer, expert] = pinned
        return _view_of(pinned, self.dtype)

    def pin_layer(self, layer: int) -> jax.Array:
        """A layer's records `[E, R]` as one pinned array, for programs that fetch.

        `records` shows that memory from here on: the host never holds all twice.
        """
        pinned = pin_records(self._records[layer]).block_until_ready()
        self._layers[layer] = pinned
        self._records[layer] = _view_of(pinned, self.dtype).reshape(pinned.shape)
        return pinned

    def pin_layers(self, num_layers: int) -> list[jax.Array | None]:
        """`pin_layer` of every layer, None in dense ones; pinned once, then kept."""
        for layer in self.moe_layers:
            if layer not in self._layers:
                self.pin_layer(layer)
        return [self._layers.get(layer) for layer in range(num_layers)]

    def num_bytes(self, layer: int, expert: int) -> int:
        """Of a block; here all are equal."""
        return self.block_bytes

    def record(self, layer: int, expert: int) -> np.ndarray:
        """The record [R] of a block: a view, read-only, valid as long as the store."""
        return self._records[layer][expert]

    def records(self, layer: int) -> np.ndarray:
        """All records of a layer `[E, R]`, read-only; not of a "pinned" store."""
        return self._records[layer]

    def source(self, layer: int, expert: int) -> np.ndarray | jax.Array:
        """What to transfer from: the pinned jax array [R], else the record."""
        pinned = self._pinned.get((layer, expert))
        return self.record(layer, expert) if pinned is None else pinned


def pin_records(
    records_ER: np.ndarray | jax.Array, device: jax.Device | None = None
) -> jax.Array:
    """Records in pinned host memory, where the backend has it.

    Args:
      records_ER: in the dtype that programs take. On a CPU the result may share its
        memory: do not write to it afterwards.
      device: that reads them; None: the first one.
    """
    return jax.device_put(records_ER, host_sharding(device))


def host_sharding(
    device: jax.Device | None = None,
) -> jax.sharding.SingleDeviceSharding:
    """Pinned host memory next to a device (None: the first), where it has such."""
    device = device or jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _view_of(pinned: jax.Array, dtype: np.dtype) -> np.ndarray:
    """Its memory as a flat NumPy array, read-only; valid as long as the array."""
    address = pinned.unsafe_buffer_pointer()
    raw = (ctypes.c_uint8 * pinned.nbytes).from_address(address)
    view = np.frombuffer(raw, np.uint8).view(dtype)
    view.flags.writeable = False
    return view


def check_mappable(reader) -> None:
    """Raises ConfigError unless files hold records as programs take them."""
    if not isinstance(reader, CheckpointReader):
        raise ConfigError(
            f"{reader.path} is not in our format and holds no expert records to "
            "map; convert it first (moe-edge convert) or keep experts in "
            "host memory"
        )
    stored = RECORD_DTYPES[reader.manifest["dtype"]]
    wanted = widened(reader.dtype)
    if reader.dtype != stored or wanted != stored:
        raise ConfigError(
            f"{reader.path} stores experts in {stored.name}, which cannot be mapped as "
            f"{wanted.name}; convert it with that --dtype or keep experts in host "
            "memory"
        )
