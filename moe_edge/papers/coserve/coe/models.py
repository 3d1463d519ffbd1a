"""From an architecture of a graph to its network: one program for all its experts.

The weights of an expert are one flat argument, the words of its record: float32 as it
is, bfloat16 as its bits, which the program widens. So a record is used where it lies.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_edge.core.checks import (
    CheckpointError,
    ConfigError,
    check_count,
    check_known,
    check_shape,
)
from moe_edge.core.json_reader import parse_json
from moe_edge.core.typed import build_known
from moe_edge.papers.coserve.coe.board_nets import BoardDetector, BoardResnet, Judged
from moe_edge.papers.coserve.coe.large_models import Resnet101, Yolov5l, Yolov5m
from moe_edge.papers.coserve.coe.layers import (
    NamedWeights,
    RecordWeights,
    Tensor,
    Weights,
)
from moe_edge.papers.coserve.workload.coe_graph import OK, Architecture
from moe_edge.papers.coserve.workload.coe_tasks import DEFECTS

MODULES = {
    "board_resnet": BoardResnet,
    "board_detector": BoardDetector,
    "resnet101": Resnet101,
    "yolov5m": Yolov5m,
    "yolov5l": Yolov5l,
}
# dtype of a graph -> what a tensor is in a record, and what a program takes.
DTYPES = {
    "float32": (np.dtype("<f4"), np.dtype("<f4")),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype("<u2")),
}
ALIGN_BYTES = 64
VERDICTS = (OK, *DEFECTS)


class Network:
    """What all experts of an architecture compute.

    Attributes:
      module: its name.
      tensors: of a record, in its order.
      record: {name, shape} of each, as `coe.json` says it.
      record_bytes: of all, filled up to 64.
      word: dtype of the flat argument of `apply`.
      input_shape: of an image; verdicts: that it can give.
    """

    def __init__(self, architecture: Architecture):
        """Checks all but the record; `get_network` checks that too."""
        module, known = architecture.module, architecture.outputs
        self.module = module
        self._net = build_known("module", MODULES, module, architecture.options)
        check_known("dtype of an architecture", architecture.dtype, DTYPES)
        self._stored, self.word = DTYPES[architecture.dtype]
        self.input_shape = _checked_shape(module, architecture.input_shape)
        self.verdicts = _checked_verdicts(module, known)
        self._net.check(self.input_shape, self.verdicts)
        self.tensors = self._list()
        self.record = [{"name": t.name, "shape": list(t.shape)} for t in self.tensors]
        size = sum(t.size for t in self.tensors) * self._stored.itemsize
        self.record_bytes = -(-size // ALIGN_BYTES) * ALIGN_BYTES

    def apply(self, words_W: jax.Array, images_NHWC: jax.Array) -> jax.Array:
        """The outputs of a batch, float32 [N, O]; pure, to be jitted.

        Args:
          words_W: of a record, see `words`.
          images_NHWC: float32, 0..1.
        """
        return self._net.compute(RecordWeights(words_W), images_NHWC, self.verdicts)

    def apply_arrays(
        self, arrays: Mapping[str, jax.Array], images_NHWC: jax.Array
    ) -> jax.Array:
        """The same of float32 tensors by name, for training."""
        return self._net.compute(NamedWeights(arrays), images_NHWC, self.verdicts)

    def judge(self, outputs_NO: np.ndarray) -> list[Judged]:
        """(verdict, scores) of each row; rows that only fill a batch are to be cut."""
        return self._net.judge(np.asarray(outputs_NO), self.verdicts)

    def words(self, record_B: np.ndarray) -> np.ndarray:
        """A record as `apply` takes it: a view.

        Raises:
          CheckpointError: it has another size.
        """
        if record_B.dtype != np.uint8 or record_B.shape != (self.record_bytes,):
            raise CheckpointError(
                f"a record is {record_B.dtype} {list(record_B.shape)}, expected uint8 "
                f"[{self.record_bytes}]"
            )
        return record_B.view(self.word)

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A record, uint8 [record_bytes], of tensors by name; rounded to its dtype."""
        record_B = np.zeros(self.record_bytes, np.uint8)
        values, first = record_B.view(self._stored), 0
        for tensor in self.tensors:
            array = np.asarray(arrays[tensor.name])
            check_shape(tensor.name, array, tensor.shape)
            values[first : first + tensor.size] = array.reshape(-1)
            first += tensor.size
        return record_B

    def unpack(self, record_B: np.ndarray) -> dict[str, np.ndarray]:
        """Tensors by name, float32, of a record."""
        values, first, arrays = self.words(record_B).view(self._stored), 0, {}
        for tensor in self.tensors:
            part = values[first : first + tensor.size].astype(np.float32)
            arrays[tensor.name] = part.reshape(tensor.shape)
            first += tensor.size
        return arrays

    def init_arrays(self, seed: int | Sequence[int]) -> dict[str, np.ndarray]:
        """Fresh tensors by name, float32."""
        rng = np.random.default_rng(seed)
        arrays = {}
        for tensor in self.tensors:
            array = np.full(tensor.shape, tensor.mean, np.float32)
            if tensor.std:
                drawn = rng.standard_normal(tensor.shape, np.float32)
                array += np.float32(tensor.std) * drawn
            arrays[tensor.name] = array
        return arrays

    def init(self, seed: int | Sequence[int]) -> np.ndarray:
        """A record of fresh weights, uint8 [record_bytes]."""
        return self.pack(self.init_arrays(seed))

    def _list(self) -> list[Tensor]:
        weights = Weights()
        images = jax.ShapeDtypeStruct((1, *self.input_shape), jnp.float32)
        jax.eval_shape(lambda x: self._net.compute(weights, x, self.verdicts), images)
        return weights.tensors


def make_architecture(
    module: str,
    options: Mapping[str, Any],
    input_shape: Sequence[int],
    outputs: Sequence[str],
    dtype: str = "bfloat16",
) -> Architecture:
    """An architecture with the record of its network.

    Raises:
      ConfigError: as `get_network`.
    """
    made = Architecture(module, options, input_shape, outputs, 1, dtype)
    network = Network(made)
    return dataclasses.replace(
        made, record=network.record, record_bytes=network.record_bytes
    )


def get_network(architecture: Architecture) -> Network:
    """The network of an architecture; one of equal contents is the same object.

    Raises:
      ConfigError: unknown module or option, images or outputs that it cannot take, or
        a record that is not the network's.
    """
    return _network(json.dumps(dataclasses.asdict(architecture), sort_keys=True))


@functools.cache
def _network(text: str) -> Network:
    architecture = Architecture(**parse_json("architecture", text))
    network = Network(architecture)
    _check_record(architecture, network)
    return network


def _check_record(architecture: Architecture, network: Network) -> None:
    module = architecture.module
    if not architecture.record:
        raise ConfigError(
            f"the architecture of {module} says no record, expected {{name, shape}} of "
            f"its {len(network.record)} tensors"
        )
    named = [(one.get("name"), one.get("shape")) for one in architecture.record]
    wanted = [(one["name"], one["shape"]) for one in network.record]
    if len(named) != len(wanted):
        raise ConfigError(
            f"the record of {module} has {len(named)} tensors, this network has "
            f"{len(wanted)}; check its options"
        )
    for place, (got, want) in enumerate(zip(named, wanted, strict=True)):
        if got != want:
            raise ConfigError(
                f"tensor {place} in the record of {module} is {got[0]} {got[1]}, this "
                f"network has {want[0]} {want[1]}; check its options"
            )
    if architecture.record_bytes != network.record_bytes:
        raise ConfigError(
            f"record_bytes of {module} is {architecture.record_bytes}, its tensors in "
            f"{architecture.dtype} take {network.record_bytes}"
        )


def _checked_shape(module: str, shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ConfigError(
            f"input_shape of {module} is {list(shape)}, expected [H, W, 3]"
        )
    for side in shape:
        check_count(f"input_shape of {module}", side)
    return tuple(shape)


def _checked_verdicts(module: str, outputs: Any) -> tuple[str, ...]:
    listed = isinstance(outputs, (list, tuple)) and outputs
    if not listed or any(
        outputs.count(one) > 1 or one not in VERDICTS for one in outputs
    ):
        raise ConfigError(
            f"outputs of {module} are {outputs!r}, expected some of "
            f"{', '.join(VERDICTS)}, each once"
        )
    return tuple(outputs)
