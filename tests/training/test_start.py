"""Fresh weights have the sizes that were asked for."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.training.default_config import default_config
from moe_edge.training.options import Start
from moe_edge.training.start import init_params

CONFIG = default_config(
    60, d_model=32, num_layers=2, num_experts=4, top_k=2, expert_dim=8, shared_dim=16
)


def test_init_params_scales_embeddings_and_experts_alone():
    small = init_params(CONFIG, 0, Start(embedding_std=0.5, expert_scale=1.0))
    large = init_params(CONFIG, 0, Start(embedding_std=2.0, expert_scale=3.0))
    factors = {
        name: 4.0 if name == "embed" else 3.0 if name.startswith("experts.") else 1.0
        for name in small
    }
    assert {"embed", "head", "experts.0", "experts.1"} <= set(factors)
    np.testing.assert_allclose(np.std(small["embed"]), 0.5, rtol=1e-5)
    for name, factor in factors.items():
        np.testing.assert_allclose(large[name], factor * small[name], rtol=1e-5)


@pytest.mark.parametrize("name", ["embedding_std", "expert_scale"])
def test_start_rejects_sizes_that_are_not_positive(name):
    with pytest.raises(ConfigError, match=rf"{name} must be positive, got 0\.0"):
        Start(**{name: 0.0})
