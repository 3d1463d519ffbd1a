"""What things cost: the only latency formulas for compute, copies and the network.

A computation is bound by arithmetic or by reading its weights, whichever is slower,
plus a fixed time a call (roofline):

    t(tokens) = call_s + max(flops(tokens) / flops_per_s, bytes / memory_bytes_per_s)

A measured device has a curve too, because small batches on a CPU are slower than both
bounds say: the maximum is multiplied by `Device.slowdown(flops / bytes)`.

Activations, their copies between host and GPU and the KV cache are not counted: at
edge batch sizes they are small compared with the weights. Token counts may be numbers
or arrays; no tokens cost nothing. Software takes no time here; `measured_costs.py` is
the cost model of a cluster on which that was measured.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.hardware.specs import Cluster, Device


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """One expert block: `num_matrices` matrices of d_model x expert_dim.

    Attributes:
      d_model: width of the hidden states that travel.
      expert_dim: neurons of the block.
      bytes_per_value: of weights and hidden states.
      num_matrices: 3 with a gate (gate, up, down), 2 without.
      bytes_per_weight: where weights are quantised; None: `bytes_per_value`.
    """

    d_model: int
    expert_dim: int
    bytes_per_value: float
    num_matrices: int = 3
    bytes_per_weight: float | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                check_positive(f"block {field.name}", value)

    @property
    def num_bytes(self) -> int:
        values = self.num_matrices * self.d_model * self.expert_dim
        return int(values * (self.bytes_per_weight or self.bytes_per_value))

    @property
    def token_bytes(self) -> int:
        """Of one hidden state."""
        return int(self.d_model * self.bytes_per_value)

    def flops(self, tokens):
        """Multiplications and additions over so many tokens."""
        return 2 * self.num_matrices * self.d_model * self.expert_dim * tokens


@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """What a layer computes besides its routed experts (attention, shared experts).

    Attributes:
      flops_per_token: of one token.
      num_bytes: weights read in every call.
    """

    flops_per_token: float = 0.0
    num_bytes: int = 0


class CallSizes(NamedTuple):
    """Bytes of a call and of its answer.

    A call is all that a step asks of one GPU in one layer.

    Attributes:
      call: of every call.
      state: there, for each token, whatever the number of its blocks.
      pair: there, for each (token, block) pair.
      token_row, pair_row: back, likewise.
    """

    call: int = 0
    state: int = 0
    pair: int = 0
    token_row: int = 0
    pair_row: int = 0

    @property
    def needs_tokens(self) -> bool:
        """Whether it matters that blocks of a call share tokens."""
        return bool(self.state or self.token_row)

    def there(self, tokens, pairs, calls=1):
        """Bytes of calls (numbers or arrays)."""
        return self.call * calls + self.state * tokens + self.pair * pairs

    def back(self, tokens, pairs):
        """Bytes of their answers."""
        return self.token_row * tokens + self.pair_row * pairs


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds on a cluster, for one model's shapes.

    The part of a layer without experts runs on GPU 0 of the server of the request.

    Attributes:
      cluster: the machines.
      block: shape of an expert block.
      dense: the rest of a layer.
    """

    cluster: Cluster
    block: BlockShape
    dense: DenseLayer = DenseLayer()

    @property
    def num_stages(self) -> int:
        """How many sizes of steps are told apart; see `stage`."""
        return 1

    def stage(self, tokens: int) -> int:
        """The size of a step of so many tokens, where programs differ by size."""
        return 0

    @property
    def call_sizes(self) -> CallSizes:
        """Bytes of calls: a token's hidden state once there, and once back the weighted
        sum over its blocks there."""
        size = self.block.token_bytes
        return CallSizes(state=size, token_row=size)

    @property
    def has_software(self) -> bool:
        """Whether anything below takes time."""
        return False

    @property
    def send_busy_s(self) -> float:
        """That a message keeps the processor of its sender busy."""
        return 0.0

    def call_s(self, server: int, stage: int = 0) -> float:
        """That a server needs for each call of another one, besides the blocks."""
        return 0.0

    def split_s(self, server: int, stage: int = 0) -> float:
        """A layer's dense part more, if other servers compute a part of the layer."""
        return 0.0

    def head_s(self, server: int, tokens: int) -> float:
        """The end of a step: head and sampling."""
        return 0.0

    def software_s(self) -> np.ndarray:
        """float64 [N]: of a call of each server, on top of carrying and computing."""
        servers = range(self.cluster.num_servers)
        return np.array([self.send_busy_s + self.call_s(n) for n in servers])

    def compute_s(self, server: int, gpu: int, tokens, stage: int | None = None):
        """One block over `tokens` tokens on a GPU that holds it."""
        device = self.cluster.servers[server].gpus[gpu].device
        return roofline_s(device, self.block.flops(tokens), self.block.num_bytes)

    def dense_s(self, server: int, tokens):
        """A layer without its routed experts, over `tokens` tokens."""
        device = self.cluster.servers[server].gpus[0].device
        flops = self.dense.flops_per_token * tokens
        seconds = roofline_s(device, flops, self.dense.num_bytes)
        return np.where(np.asarray(tokens) > 0, seconds, 0.0)[()]

    def load_s(self, server: int, gpu: int) -> float:
        """Copy of one block from host memory to the GPU."""
        link = self.cluster.servers[server].gpus[gpu].host_link
        return link.seconds(self.block.num_bytes)

    def mean_load_s(self) -> np.ndarray:
        """float64 [N]: `load_s`, the mean over the GPUs of each server."""
        servers = enumerate(self.cluster.servers)
        each = [[self.load_s(n, g) for g in range(len(s.gpus))] for n, s in servers]
        return np.array([np.mean(loads) for loads in each])

    def send_s(self, n: int, m: int, tokens):
        """Hidden states of `tokens` tokens from server n to server m."""
        if n == m:
            return tokens * 0.0
        seconds = self.cluster.link(n, m).seconds(tokens * self.block.token_bytes)
        return np.where(np.asarray(tokens) > 0, seconds, 0.0)[()]

    def sends_s(self, tokens: float = 1) -> np.ndarray:
        """float64 [N, N]: `send_s` from every server to every other one."""
        num_bytes, servers = tokens * self.block.token_bytes, self.cluster.num_servers
        link, all_N = self.cluster.link, range(servers)
        send_NM = np.array(
            [[link(n, m).seconds(num_bytes) for m in all_N] for n in all_N]
        )
        np.fill_diagonal(send_NM, 0.0)
        return send_NM

    def move_s(self, n: int, m: int, gpu: int) -> float:
        """One block from host memory of server n to a GPU of server m."""
        load_s = self.load_s(m, gpu)
        if n == m:
            return load_s
        return self.cluster.link(n, m).seconds(self.block.num_bytes) + load_s


def roofline_s(device: Device, flops, num_bytes):
    """One call: the slower of arithmetic and reading weights, plus the fixed time.

    Raises:
      ConfigError: negative work.
    """
    flops = np.asarray(flops, np.float64)
    if (flops < 0).any():
        raise ConfigError(f"token counts must be 0 or more, got {flops.min()} flops")
    bound = np.maximum(
        flops / device.flops_per_s, num_bytes / device.memory_bytes_per_s
    )
    if device.curve:
        bound = bound * device.slowdown(flops / max(num_bytes, 1))
    return np.where(flops > 0, device.call_s + bound, 0.0)[()]
