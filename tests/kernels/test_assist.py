"""START and WAIT of experts that the host computes, on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import assist, native, side_calls
from moe_edge.model.experts import pair_rows
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from tests.support.side_streams import pinned, watching
from tests.support.tiny_models import ALL, RandomReader

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)
STEP = [
    *("compute records", "assist waits", "assist copies", "assist copies"),
    *("assist calls the host", "assist copies", "assist records", "compute waits"),
]


@pytest.fixture(autouse=True)
def watched():
    yield from watching(assist.open_calls)


class Given:
    """Records of a tiny model's layer, and what its tokens chose."""

    def __init__(self, name: str, tokens: int, dtype=np.float32):
        config = ALL[name]
        reader = RandomReader(config, dtype=dtype)
        moe = self.moe = config.moe
        self.layout, rng = RecordLayout.of(config), np.random.default_rng(0)
        self.E, K = moe.num_experts, moe.top_k
        self.host_ER = pinned(reader.experts(config.moe_layers[0]))
        self.x_TD = rng.standard_normal((tokens, config.d_model), np.float32)
        ids = [rng.permutation(self.E)[:K] for _ in range(tokens)]
        self.ids_TK = np.array(ids, np.int32)
        self.limits = moe.activation, moe.swiglu_limit

    def run(self, ids_TK, then=lambda x: x):
        @jax.jit
        def both(ids_TK, x_TD, host_ER):
            given = ids_TK, x_TD, host_ER, self.layout, *self.limits
            under_way, (x_TD,) = assist.start(*given, [x_TD + 0])
            return assist.wait(under_way, [then(x_TD)])

        return both(ids_TK, self.x_TD, self.host_ER)

    def rows(self, ids_TK):
        act = functools.partial(activate, kind=self.limits[0], limit=self.limits[1])

        @native.within
        def rows(*given):
            return pair_rows(*given, self.layout, act)

        return jax.jit(rows)(self.x_TD, ids_TK, jnp.asarray(np.asarray(self.host_ER)))


@pytest.mark.parametrize(
    "name, tokens, dtype",
    [
        ("gqa", 1, np.float32),
        ("gqa", 3, jnp.bfloat16),
        ("gpt_oss", 2, np.float32),
        ("q4_0", 2, np.float32),
        ("gqa", 16, np.float32),
    ],
)
def test_rows_are_those_of_the_device_and_zeros_elsewhere(name, tokens, dtype):
    given = Given(name, tokens, dtype)
    ids_TK = given.ids_TK.copy()
    ids_TK[:, ::2] = given.E  # those the device computes
    rows_PD, (x_TD,) = given.run(ids_TK)
    np.testing.assert_array_equal(rows_PD, given.rows(ids_TK))
    assert not np.asarray(rows_PD)[ids_TK.reshape(-1) == given.E].any()
    assert np.asarray(rows_PD)[ids_TK.reshape(-1) < given.E].all(axis=1).any()
    np.testing.assert_array_equal(x_TD, given.x_TD)


def test_nobody_waits_but_streams():
    """Once the room is there; and nothing runs before the wait."""
    given = Given("gqa", 1)
    given.run(given.ids_TK)
    side_calls.watch(True)
    given.run(given.ids_TK, then=lambda x_TD: jnp.sin(x_TD) * 2)
    experts = f"computed {given.ids_TK.size} experts"
    assert side_calls.watch(True) == [*STEP, experts]


def test_two_layers_may_be_under_way():
    """As with deferral: the first is waited for behind the second's start."""
    given = Given("gqa", 2)
    other_TK = given.ids_TK[::-1].copy()

    @jax.jit
    def both(ids_TK, other_TK, x_TD, host_ER):
        given_ = x_TD, host_ER, given.layout, *given.limits
        one, (other_TK,) = assist.start(ids_TK, *given_, [other_TK + 0])
        other, (x_TD,) = assist.start(other_TK, *given_, [x_TD + 0])
        rows_PD, (x_TD,) = assist.wait(one, [x_TD])
        return rows_PD, assist.wait(other, [x_TD])[0]

    found = both(given.ids_TK, other_TK, given.x_TD, given.host_ER)
    np.testing.assert_array_equal(found[0], given.rows(given.ids_TK))
    np.testing.assert_array_equal(found[1], given.rows(other_TK))


def test_an_expert_below_0_is_refused_by_the_next_start():
    given = Given("gqa", 1)
    given.run(given.ids_TK - given.E)
    with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id below 0"):
        jax.block_until_ready(given.run(given.ids_TK))
    given.run(given.ids_TK)


def test_shapes_that_do_not_fit_are_refused():
    given = Given("gqa", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"expected ids \[T, K\]"):
        jax.block_until_ready(given.run(np.zeros((2, 1), np.int32)))
    given.host_ER = pinned(np.zeros((2, 3), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="records of 3 values"):
        jax.block_until_ready(given.run(given.ids_TK))


def test_without_the_host_kernels_it_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(native, "choice", lambda: "xla")
        with pytest.raises(ConfigError, match="MOE_EDGE_KERNELS is xla; leave one"):
            assist.open_calls.__wrapped__()
