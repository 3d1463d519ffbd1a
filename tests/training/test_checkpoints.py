"""Saving and restoring the training state."""

import json

import jax
import numpy as np
import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.training import checkpoints, step
from moe_edge.training.default_config import default_config
from moe_edge.training.start import init_params
from tests.support.tiny_checkpoints import raw_config
from tests.support.tiny_models import MIXED

CONFIG = default_config(
    50, d_model=32, num_layers=1, num_experts=4, top_k=2, expert_dim=8, shared_dim=16
)


def test_restore_gives_back_parameters_optimizer_progress_and_config(tmp_path):
    hyper = step.Hyper()
    params = init_params(CONFIG, 0)
    optimizer = jax.tree.map(lambda x: x + 1, step.make_optimizer(hyper).init(params))
    state = step.TrainState(params, optimizer)
    progress = checkpoints.Progress(step=1, tokens=16, position=2, seconds=0.5)
    with checkpoints.open_checkpoints(tmp_path / "run") as manager:
        checkpoints.save(manager, state, progress, CONFIG)
    with checkpoints.open_checkpoints(tmp_path / "run") as manager:
        got, got_progress, got_config = checkpoints.restore(manager, hyper)
    assert (got_progress, got_config) == (progress, CONFIG)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_restore_of_new_folder_is_none(tmp_path):
    with checkpoints.open_checkpoints(tmp_path / "run") as manager:
        assert checkpoints.restore(manager, step.Hyper()) is None


@pytest.mark.parametrize("name", ["one_kind", "two_kinds", "indexer"])
def test_config_to_json_and_back_is_the_same(name):
    configs = {"one_kind": CONFIG, "two_kinds": MIXED}
    configs["indexer"] = config_from_hf(raw_config("deepseek_v32"))
    config = configs[name]
    fields = json.loads(json.dumps(checkpoints.config_to_json(config)))
    assert checkpoints.config_from_json(fields) == config
