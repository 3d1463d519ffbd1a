"""A random model whose routers repeat a recorded trace, by construction.

Speed under offloading depends on which experts follow which; random routers choose
uniformly. Here token t of the vocabulary is step t of a trace: its embedding holds a
one in dimension t of a reserved part of the residual stream, nothing else writes to
that part, and router l reads only it. So layer l chooses what the trace chose in step
t, in every engine, whatever the rest of the weights: no engine knows of it.
"""

import numpy as np

from moe_edge.checkpoint.reader import DenseReader
from moe_edge.checkpoint.schema import item_shapes
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.studies.speed.models import draw_pool, random_matrix
from moe_edge.workload.traces import DECODE, Trace

_OUTPUTS = ("attn.o", "shared.down", "mlp.down")  # what writes to the residual stream


def trace_choices(trace: Trace, config: ModelConfig) -> np.ndarray:
    """What a model of this shape chooses in the trace's decode steps: [steps, L, K].

    A token keeps its first k ranks, their ids as `distinct` makes them; MoE layer
    number i takes the trace's layer i, modulo its layers.

    Raises:
      ConfigError: the trace has fewer ranks than the model chooses, or no decode step.
    """
    E, K = config.moe.num_experts, config.moe.top_k
    is_decode = trace.phase == DECODE
    if trace.top_k < K or not is_decode.any():
        raise ConfigError(
            f"trace with {trace.top_k} experts a token and {int(is_decode.sum())} "
            f"decode rows cannot drive a model that chooses {K}; take another trace"
        )
    steps = np.unique(trace.step[is_decode])
    chosen_SLK = np.zeros((len(steps), config.num_layers, K), np.int32)
    for number, layer in enumerate(config.moe_layers):
        rows = is_decode & (trace.layer == number % trace.num_layers)
        for place, ids_K in zip(
            np.searchsorted(steps, trace.step[rows]), trace.ids_TK[rows], strict=True
        ):
            chosen_SLK[place, layer] = distinct(ids_K[:K], E)
    return chosen_SLK


def distinct(ids_K, num_experts: int) -> list[int]:
    """Ids modulo E, each once: a duplicate takes the next free one."""
    taken: list[int] = []
    for expert in np.asarray(ids_K).tolist():
        expert %= num_experts
        while expert in taken:
            expert = (expert + 1) % num_experts
        taken.append(expert)
    return taken


class TracedReader(DenseReader):
    """An open checkpoint in memory: random weights, routing from `chosen_SLK`."""

    path = "a random model"
    hf_source = None

    def __init__(
        self, config: ModelConfig, chosen_SLK: np.ndarray, dtype, seed: int = 0
    ):
        steps = len(chosen_SLK)
        if steps > min(config.vocab_size, config.d_model // 2):
            raise ConfigError(
                f"{steps} steps need as many tokens and half as many dimensions; the "
                f"model has {config.vocab_size} and {config.d_model}"
            )
        self.config, self.dtype = config, np.dtype(dtype)
        self.layout, self._chosen_SLK = RecordLayout.of(config), chosen_SLK
        self._pool, self._seed = draw_pool(np.random.default_rng(seed)), seed
        # Records are pieces of one long row, copied as bytes: 14 GB in seconds.
        pool = (self._pool / np.float32(np.sqrt(config.d_model))).astype(self.dtype)
        row = np.tile(pool, -(-self.layout.size // pool.size) + 1)
        self._row_bytes = row.view(np.uint8)

    def _draw(self, shape, *path: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, *path))
        return random_matrix(rng, self._pool, shape)

    def dense(self, item) -> dict[str, np.ndarray]:
        """Canonical name -> array of one item."""
        steps, arrays = len(self._chosen_SLK), {}
        for number, (name, shape) in enumerate(item_shapes(self.config, item).items()):
            if name.endswith("norm"):
                array = np.ones(shape, np.float32)
            elif name == "router.weight":
                array = self._router(item, shape)
            elif len(shape) == 1:
                array = np.zeros(shape, np.float32)
            else:
                where = item if isinstance(item, int) else -1
                array = self._draw(shape, where + 1, number)
            if name == "embed":
                array[:, :steps] = 0
                array[np.arange(steps), np.arange(steps)] = 1
            elif name in _OUTPUTS:
                array[:steps] = 0
            arrays[name] = array.astype(self.dtype)
        return arrays

    def _router(self, layer: int, shape) -> np.ndarray:
        chosen_SK = self._chosen_SLK[:, layer]
        steps, K = chosen_SK.shape
        weight_ED = np.zeros(shape, np.float32)
        weight_ED[chosen_SK, np.arange(steps)[:, None]] = 0.25 * (K - np.arange(K))
        return weight_ED

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with consecutive records beginning with row `first`."""
        steps = len(self._chosen_SLK)
        for row, record_R in enumerate(out_NR):
            rng = np.random.default_rng((self._seed, 0, layer, first + row))
            start = int(rng.integers(self._pool.size))
            first_byte = start * self.dtype.itemsize
            source = self._row_bytes[first_byte : first_byte + record_R.nbytes]
            np.copyto(record_R.view(np.uint8), source)
            self.layout.part(record_R, "down")[:steps] = 0

    def release(self) -> None:
        """Nothing is kept between calls."""
