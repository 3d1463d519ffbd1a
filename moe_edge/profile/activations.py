"""Programs of the profiler: one layer over a batch of windows, neurons of an expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import CheckpointError
from moe_edge.core.float32 import PRECISION
from moe_edge.engine.programs import jit_step
from moe_edge.engine.weights import bind_block, block_graph, to_device
from moe_edge.model.branches import add_experts, seam
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_blocks import load_expert
from moe_edge.model.experts import run_experts
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import layer_window, make_chunk

MAX_FLOAT16 = 65504.0
ROWS = 64  # sampled rows are padded to a power of two from here: few shapes


def _not_finite(what: str) -> CheckpointError:
    return CheckpointError(f"{what} are not finite; check the model's weights")


class Seen(NamedTuple):
    """What the experts of a layer were given; T = windows x tokens, with padding."""

    hidden_TD: jax.Array  # float32, normed: input of the experts
    ids_TK: jax.Array  # int32, best first; padding has id E
    weights_TK: jax.Array  # float32


class LayerPrograms:
    """Runs layers one at a time from a reader; only the current one is in memory."""

    def __init__(self, reader):
        self.config: ModelConfig = reader.config
        self._reader, self._layout = reader, RecordLayout.of(reader.config)
        config = self.config
        self._kinds = [config.like(layer) for layer in range(config.num_layers)]
        self._graphs = {kind: block_graph(config, kind) for kind in {*self._kinds}}
        options = {"static_argnums": 0, "donate_argnames": "x_BSD"}
        self._dense = jit_step(self._dense_step, **options)
        self._moe = jit_step(self._moe_step, **options)
        self._neurons = jit_step(self._neurons_step)

    def embed(self, tokens_NW: np.ndarray) -> np.ndarray:
        """States before the first layer, float32 `[N, W, D]`.

        Raises:
          CheckpointError: one that is not finite.
        """
        x_NWD = np.asarray(self._reader.top()["embed"])[tokens_NW].astype(np.float32)
        if not np.isfinite(x_NWD).all():
            raise _not_finite("embeddings")
        scale = self.config.embed_scale
        return x_NWD if scale == 1 else x_NWD * np.float32(scale)

    def load(self, layer: int) -> None:
        """Makes a layer the current one."""
        self._number = layer
        self._layer = self._experts = None  # freed before the next is read
        dense = self._reader.dense_layer(layer)
        self._layer = {name: to_device(array) for name, array in dense.items()}
        self._window = jnp.int32(layer_window(self.config, layer))
        if layer in self.config.moe_layers:
            self._experts = to_device(self._reader.experts(layer))
        self._reader.release()

    def run(self, x_BSD: np.ndarray, valid_BS: np.ndarray):
        """(states after the current layer, `Seen` or None in a dense layer)."""
        x, valid = jnp.array(x_BSD), jnp.array(valid_BS)
        kind = self._kinds[self._number]
        if self._experts is None:
            return self._dense(kind, self._layer, x, valid, self._window), None
        return self._moe(kind, self._layer, self._experts, x, valid, self._window)

    def neurons(self, expert: int, hidden_TD: np.ndarray) -> tuple[np.ndarray, int]:
        """(an expert's activations, float16 `[T, F]`; how many had to be clipped).

        Args:
          expert: of the current layer.
          hidden_TD: float32, normed hidden states of tokens routed to it.
        Raises:
          CheckpointError: one that is not finite.
        """
        rows = len(hidden_TD)
        padded = max(ROWS, 1 << (rows - 1).bit_length())
        x = np.zeros((padded, hidden_TD.shape[1]), np.float32)
        x[:rows] = hidden_TD
        found = self._neurons(self._experts, jnp.int32(expert), jnp.array(x))
        out_TF, finite_T, clipped_T = (np.asarray(array)[:rows] for array in found)
        if not finite_T.all():
            raise _not_finite(f"layer {self._number}, expert {expert}: activations")
        return out_TF, int(clipped_T.sum())

    def check_states(self, x_TD: np.ndarray, seen: Seen | None) -> None:
        """Refuses states after the current layer that are not finite.

        Without this the first expert of a later layer would be blamed.

        Args:
          x_TD: states of T tokens, without padding.
          seen: what the layer's experts got for them; None in a dense layer.
        Raises:
          CheckpointError: names the layer, and the expert if it is an expert's fault.
        """
        finite_T = np.isfinite(x_TD).all(axis=1)
        if finite_T.all():
            return
        where, token = f"layer {self._number}", int(finite_T.argmin())
        if seen is not None and np.isfinite(seen.hidden_TD[token]).all():
            for expert in (chosen_K := seen.ids_TK[token]):
                self.neurons(int(expert), seen.hidden_TD[token : token + 1])
            where += f", after its experts {', '.join(map(str, chosen_K))}"
        raise _not_finite(f"{where}: hidden states")

    def _attend(self, block, x_BSD, valid_BS, window):
        start_B = jnp.zeros(x_BSD.shape[0], jnp.int32)
        chunk = make_chunk(self.config, start_B, valid_BS)
        return *block.attend(x_BSD, chunk, window)[0], chunk

    def _dense_step(self, kind, layer, x_BSD, valid_BS, window):
        block = bind_block(self._graphs[kind], layer)
        x_BSD, normed_BSD, _ = self._attend(block, x_BSD, valid_BS, window)
        return block.add_mlp(x_BSD, normed_BSD)

    def _moe_step(self, kind, layer, experts_ER, x_BSD, valid_BS, window):
        # `Block.__call__` with the experts' input handed out.
        block = bind_block(self._graphs[kind], layer)
        x_BSD, normed_BSD, chunk = self._attend(block, x_BSD, valid_BS, window)
        hidden, routing = seam(block.route(normed_BSD, chunk))
        shared = seam(block.run_shared(hidden, routing))
        hidden = block.expert_input(hidden, routing)
        y_TD = run_experts(
            hidden,
            routing.ids_TK,
            routing.weights_TK,
            experts_ER,
            self._layout,
            activation=self.config.moe.activation,
            swiglu_limit=self.config.moe.swiglu_limit,
        )
        x_BSD = add_experts(self.config, x_BSD, seam(y_TD), shared)
        return x_BSD, Seen(hidden, routing.ids_TK, routing.weights_TK)

    def _neurons_step(self, experts_ER, expert, x_TD):
        F, moe = self._layout.expert_dim, self.config.moe
        gate_up_GD, _, biases = load_expert(experts_ER, expert, self._layout)
        both_GT = jnp.matmul(gate_up_GD, x_TD.T, precision=PRECISION)
        if biases is not None:
            both_GT = both_GT + biases[: 2 * F, None]
        kind, limit = moe.activation, moe.swiglu_limit
        out_TF = activate(both_GT[:F], both_GT[F:], kind=kind, limit=limit).T
        # Before the clip, which would make infinity a number.
        finite_T = jnp.isfinite(out_TF).all(axis=1)
        clipped_T = (jnp.abs(out_TF) > MAX_FLOAT16).sum(axis=1)
        clipped_TF = jnp.clip(out_TF, -MAX_FLOAT16, MAX_FLOAT16).astype(jnp.float16)
        return clipped_TF, finite_T, clipped_T
