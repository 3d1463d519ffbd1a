"""Delta-nets' states by our kernels (MOE_EDGE_DELTA_STATE=1) or by XLA.

Asks which is faster in layers of Qwen3.6-35B-A3B's size, random weights: a step at
batch 1 and 8, whose bound is a state read once and written once, and a prompt of 512
tokens. The layers stand alone, without experts.
"""

import os
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_edge.kernels import delta_state, native, switches
from moe_edge.model.delta_net import DeltaNet
from moe_edge.model.state_config import DeltaConfig

WIDTH = 2048 if jax.default_backend() == "gpu" else 64  # on a CPU it is only tried
STEPS = 16 if jax.default_backend() == "gpu" else 2
NET = DeltaConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
CASES = ((1, 1), (8, 1), (1, 512))  # batch, tokens of each row


class Model:
    """What a layer asks of its model."""

    d_model, norm_eps = WIDTH, 1e-6

    def attention_of(self, layer: int) -> DeltaConfig:
        return NET


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report = common.Report("states", given.out_dir)
    report.add("layers", given.layers)
    rng, shapes = np.random.default_rng(0), NET.weight_shapes(WIDTH)
    weights = [
        {name: _drawn(rng, shape) for name, shape in shapes.items()}
        for _ in range(given.layers)
    ]
    for batch, tokens in CASES:
        name = f"batch {batch} tokens {tokens}"
        with report.attempt(name):
            cases = {}
            for kind in switches.OFF_ON:
                os.environ[delta_state.VARIABLE] = kind  # read in compilation
                cases[kind] = _case(weights, batch, tokens)
                cases[kind]()
            ways = {"XLA": cases["0"], "kernels": cases["1"]}
            report.add(f"{name}, ms", common.in_turn(ways, given.rounds))
            for way, case in ways.items():
                profile = common.profile(case, STEPS, top=8)
                report.add(f"{name}, {way}, profile", profile)


def _drawn(rng, shape) -> jax.Array:
    dtype = jnp.bfloat16 if len(shape) == 2 else jnp.float32
    return jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), dtype)


def _case(weights, batch: int, tokens: int):
    """A call that gives the mean milliseconds of STEPS runs through all layers."""
    valid_BS = jnp.ones((batch, tokens), bool)
    x_BSD = jnp.ones((batch, tokens, WIDTH), jnp.float32)

    def run(weights, x_BSD, valid_BS, caches):
        after = []
        for arrays, cache in zip(weights, caches, strict=True):
            net = nnx.eval_shape(lambda: DeltaNet(Model(), 0, nnx.Rngs(0)))
            for name, array in arrays.items():
                setattr(net, name, nnx.Param(array))
            y_BSD, cache = net(x_BSD, valid_BS, cache)
            x_BSD = x_BSD + y_BSD
            after.append(cache)
        return x_BSD, after

    program = jax.jit(native.within(run), donate_argnums=3)
    shapes = NET.state_shapes(batch)
    caches = [
        {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
        for _ in weights
    ]

    def timed() -> float:
        nonlocal caches
        begun_s = time.perf_counter()
        for _ in range(STEPS):
            y_BSD, caches = program(weights, x_BSD, valid_BS, caches)
            y_BSD.block_until_ready()
        return common.MS * (time.perf_counter() - begun_s) / STEPS

    return timed


if __name__ == "__main__":
    main()
