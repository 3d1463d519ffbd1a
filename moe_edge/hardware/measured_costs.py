"""The cost model of a real cluster: what its run measured instead of formulas.

All that a server sends goes over one line. Which cores it has says the calibration.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cluster_calibration import BucketCosts, ClusterCalibration
from moe_edge.hardware.cost_model import CallSizes, CostModel
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server


class MeasuredBlock(NamedTuple):
    """Sizes of a block; as far as `cost_model.BlockShape` is read here.

    Attributes:
      num_bytes: of its weights.
      token_bytes: that a token occupies the lines with, the mean of there and back.
    """

    num_bytes: int
    token_bytes: int


@dataclasses.dataclass(frozen=True)
class MeasuredCosts(CostModel):
    """Seconds on a cluster that was measured.

    Attributes:
      calibration: of it; stages of steps are its buckets.
    """

    calibration: ClusterCalibration = dataclasses.field(kw_only=True)

    @classmethod
    def of(
        cls, calibration: ClusterCalibration, slots: Sequence[int], block_bytes: int
    ) -> "MeasuredCosts":
        """A cluster as it was measured.

        Args:
          slots: blocks that a placement may use on each server.
        Raises:
          ConfigError: slots of another number of servers.
        """
        if len(slots) != len(calibration.servers):
            raise ConfigError(
                f"slots of {len(slots)} servers, the calibration is of "
                f"{len(calibration.servers)}"
            )
        messages, source = calibration.messages, calibration.source
        servers = []
        for number, (costs, count) in enumerate(
            zip(calibration.servers, slots, strict=True)
        ):
            memory, decode = int(count) * block_bytes, costs.buckets[0]
            device = Device(
                name=f"processor of server {number}",
                memory_bytes=max(memory, 1),
                flops_per_s=1 / (decode.block_s + decode.pair_s),  # no formula uses it
                memory_bytes_per_s=block_bytes / (decode.block_s + decode.pair_s),
                source=source,
            )
            load = Link(bytes_per_s=block_bytes / costs.load_s, source=source)
            gpu = Gpu(device=device, host_link=load, expert_memory_bytes=memory)
            servers.append(Server(name=f"server {number}", gpus=(gpu,)))
        network = Link(
            bytes_per_s=messages.bytes_per_s,
            latency_s=messages.base_s / 2,
            source=source,
        )
        travels = messages.token_bytes + messages.pair_bytes + messages.row_bytes
        return cls(
            Cluster(servers=tuple(servers), network=network, sharing="egress"),
            MeasuredBlock(block_bytes, -(-travels // 2)),
            calibration=calibration,
        )

    def _bucket(self, server: int, stage: int) -> BucketCosts:
        return self.calibration.servers[server].buckets[stage]

    def _each(self, server: int, name: str) -> np.ndarray:
        buckets = self.calibration.servers[server].buckets
        return np.array([getattr(bucket, name) for bucket in buckets])

    @property
    def num_stages(self) -> int:
        return len(self.calibration.sizes)

    def stage(self, tokens):
        """The bucket of a step; of longer ones the largest (number or array)."""
        place = np.searchsorted(self.calibration.sizes, tokens)
        return np.minimum(place, self.num_stages - 1)[()]

    @property
    def call_sizes(self) -> CallSizes:
        sent = self.calibration.messages
        sizes = sent.call_bytes, sent.token_bytes, sent.pair_bytes
        return CallSizes(*sizes, 0, sent.row_bytes)

    @property
    def has_software(self) -> bool:
        return True

    @property
    def send_busy_s(self) -> float:
        return self.calibration.messages.each_s

    def call_s(self, server: int, stage: int = 0) -> float:
        return self._bucket(server, stage).call_s

    def split_s(self, server: int, stage: int = 0) -> float:
        return self._bucket(server, stage).split_s

    def head_s(self, server: int, tokens: int) -> float:
        return self._bucket(server, self.stage(tokens)).head_s

    def compute_s(self, server: int, gpu: int, tokens, stage: int | None = None):
        """A block over `tokens` tokens, in a step of a stage (None: of just these)."""
        tokens = np.asarray(tokens, np.float64)
        place = self.stage(tokens) if stage is None else stage
        seconds = self._each(server, "block_s")[place]
        seconds = seconds + self._each(server, "pair_s")[place] * tokens
        return np.where(tokens > 0, seconds, 0.0)[()]

    def dense_s(self, server: int, tokens):
        """A layer without its routed experts; beyond the largest bucket in chunks."""
        largest, tokens = self.calibration.sizes[-1], np.asarray(tokens)
        dense_s = self._each(server, "dense_s")
        rest_s = np.where(tokens % largest, dense_s[self.stage(tokens % largest)], 0.0)
        return (tokens // largest * dense_s[-1] + rest_s)[()]
