import jax
import numpy as np
import pytest
from flax import nnx

from moe_edge.checkpoint.schema import dense_items, item_shapes
from moe_edge.convert.families import config_from_hf
from moe_edge.model.record import RecordLayout
from moe_edge.model.shapes import kept_shapes
from moe_edge.model.transformer import Transformer, init_experts
from tests.support.tiny_checkpoints import CONFIGS, raw_config
from tests.support.tiny_models import GQA


@pytest.mark.parametrize("family", CONFIGS)
def test_parameter_paths_are_the_names_of_the_schema(family):
    config = config_from_hf(raw_config(family))
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    got = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
    expected = {
        name if isinstance(item, str) else f"blocks.{item}.{name}": shape
        for item in dense_items(config)
        for name, shape in item_shapes(config, item).items()
        if isinstance(item, str) or name not in kept_shapes(config, item)
    }
    assert got == expected


def test_init_experts_gives_records_of_moe_layers_only():
    experts = init_experts(GQA, jax.random.key(0))
    assert [e is None for e in experts] == [True, False, False]
    assert experts[1].shape == (GQA.moe.num_experts, RecordLayout.of(GQA).size)
    assert not np.array_equal(experts[1], experts[2])
