"""What is busy until when: GPUs, network links and host links, each one job at a time.

Jobs are served in the order in which they become ready, without interruption; the
event loop calls in that order, so a queue is one number: when its owner is free.
"""

import numpy as np

from moe_edge.hardware.cost_model import CostModel
from moe_edge.simulate.cluster.calls import GpuIndex
from moe_edge.simulate.cluster.timeline import Spans

CALL, MIGRATE, PROMPT = "call", "migrate", "prompt"
CAUSES = (CALL, MIGRATE, PROMPT)


class Links:
    """Queues of a cluster, and what went through them.

    Attributes:
      gpu_free, gpu_busy: seconds, a GPU.
      host_links: from host memory to each GPU.
      host_free, host_busy, host_bytes: of these.
      link_free, link_busy: seconds, a network link.
      link_of, byte_s, late_s: at n * N + m, the link from server n to m, its seconds a
        byte, and its latency.
      sent: cause -> bytes from server n to m at n * N + m.
    """

    def __init__(self, cost_model: CostModel, index: GpuIndex, spans: Spans):
        cluster = cost_model.cluster
        N, G = cluster.num_servers, len(index.server_G)
        self.num_servers, self.spans = N, spans
        self.gpu_free, self.gpu_busy = [0.0] * G, [0.0] * G
        self.host_free, self.host_busy, self.host_bytes = [0.0] * G, [0.0] * G, [0] * G
        network = [[cluster.link(n, m) for m in range(N)] for n in range(N)]
        self.byte_s = [1 / link.bytes_per_s for row in network for link in row]
        self.late_s = [link.latency_s for row in network for link in row]
        pair = cluster.sharing == "pair"
        self.link_of = [n * N + m if pair else n for n in range(N) for m in range(N)]
        count = N * N if pair else N
        self.link_free, self.link_busy = [0.0] * count, [0.0] * count
        self.sent = {cause: [0] * (N * N) for cause in CAUSES}
        self.host_links = [g.host_link for s in cluster.servers for g in s.gpus]

    def compute(self, gpu: int, ready_s: float, seconds: float, name: str) -> float:
        """Queues a job on a GPU: when it ends."""
        start_s = max(ready_s, self.gpu_free[gpu])
        self.gpu_free[gpu] = end_s = start_s + seconds
        self.gpu_busy[gpu] += seconds
        self.spans.add("gpu", gpu, name, start_s, seconds)
        return end_s

    def send(self, n: int, m: int, ready_s: float, num_bytes: int, cause: str) -> float:
        """Queues a message from server n to m: when it is there."""
        pair = n * self.num_servers + m
        link = self.link_of[pair]
        start_s = max(ready_s, self.link_free[link])
        seconds = num_bytes * self.byte_s[pair]
        self.link_free[link] = end_s = start_s + seconds
        self.link_busy[link] += seconds
        self.sent[cause][pair] += num_bytes
        self.spans.add("link", pair, cause, start_s, seconds)
        return end_s + self.late_s[pair]

    def load(self, gpu: int, ready_s: float, num_bytes: int, cause: str) -> float:
        """Queues a copy from host memory to a GPU: when it is there."""
        link = self.host_links[gpu]
        start_s = max(ready_s, self.host_free[gpu])
        seconds = link.busy_s(num_bytes)
        self.loaded(gpu, start_s, seconds, num_bytes, cause)
        return start_s + seconds + link.latency_s

    def loaded(
        self, gpu: int, start_s: float, seconds: float, num_bytes: int, cause: str
    ) -> None:
        """Takes note of a copy from host memory that somebody else queued."""
        self.host_free[gpu] = start_s + seconds
        self.host_busy[gpu] += seconds
        self.host_bytes[gpu] += num_bytes
        self.spans.add("host", gpu, cause, start_s, seconds)

    @property
    def end_s(self) -> float:
        """When the last job ended."""
        return max(*self.gpu_free, *self.link_free, *self.host_free)

    def bytes_NN(self, cause: str) -> np.ndarray:
        """int64 [N, N]: bytes that went from server to server."""
        N = self.num_servers
        return np.array(self.sent[cause], np.int64).reshape(N, N)
