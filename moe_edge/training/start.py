"""The weights that a training run starts from: fresh ones, or those of a checkpoint."""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.checkpoint.schema import dense_items
from moe_edge.model.config import ModelConfig
from moe_edge.model.transformer import Transformer, init_experts
from moe_edge.training.options import Start

Params = dict[str, jax.Array]


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


def stored_params(reader) -> Params:
    """The same of a checkpoint that is read in float32."""
    params = {}
    for item in dense_items(reader.config):
        prefix = "" if isinstance(item, str) else f"blocks.{item}."
        for name, array in reader.dense(item).items():
            params[prefix + name] = jnp.array(array, jnp.float32)
    for layer in reader.config.moe_layers:
        params[f"experts.{layer}"] = jnp.array(reader.experts(layer), jnp.float32)
    return params
