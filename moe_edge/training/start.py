"""The weights that a training run starts from."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.core.checks import check_positive
from moe_edge.model.config import ModelConfig
from moe_edge.model.transformer import Transformer, init_experts

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Start:
    """How large fresh weights are.

    Attributes:
      embedding_std: standard deviation of the token embeddings. They begin the
        residual stream, and at the usual 0.02 the first layers' outputs drown them.
      expert_scale: factor on the experts' usual start: eight outputs that are averaged
        add up to less than one.
    """

    embedding_std: float = 1.0
    expert_scale: float = 1.5

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            check_positive(name, value)


def init_params(config: ModelConfig, seed: int, start: Start | None = None) -> Params:
    """Fresh float32 parameters: dense by path, expert records as `experts.0`, .."""
    start = start or Start()
    model_key, expert_key = jax.random.split(jax.random.key(seed))
    _, state = nnx.split(Transformer(config, nnx.Rngs(model_key)))
    params = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)
    }
    params["embed"] *= start.embedding_std / jnp.std(params["embed"])
    for layer, records in enumerate(init_experts(config, expert_key)):
        if records is not None:
            params[f"experts.{layer}"] = start.expert_scale * records
    return params
