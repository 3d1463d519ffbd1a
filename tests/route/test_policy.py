import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.route.base import ROUTES, get_route


def test_topk_hands_back_the_model_s_own_arrays():
    policy = get_route("topk")
    ids_TK, weights_TK = np.zeros((2, 3), np.int32), np.ones((2, 3), np.float32)
    got = policy.route(0, None, None, None, ids_TK, weights_TK)
    assert got[0] is ids_TK and got[1] is weights_TK
    assert policy.lossless


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_route_names_itself_and_its_source(name):
    policy = get_route(name)
    assert policy.name == name and policy.SOURCE
    assert policy.lossless == (name == "topk")


def test_get_route_rejects_unknown_name_and_option():
    with pytest.raises(
        ConfigError, match="route policy 'top'; did you mean 'topk'. known"
    ):
        get_route("top")
    with pytest.raises(
        ConfigError, match="substitute has no option 'b'; known: a, wei"
    ):
        get_route("substitute", b=1)
    with pytest.raises(ConfigError, match="topk has no option 'a'; known: none"):
        get_route("topk", a=1)
