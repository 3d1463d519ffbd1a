"""A traced random model chooses what the trace chose, in whichever engine it runs."""

import jax
import numpy as np
import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import ConfigError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.studies.speed.models import olmoe_config
from moe_edge.studies.speed.traced_model import TracedReader, distinct, trace_choices
from moe_edge.workload.traces import DECODE, Trace

STEPS, LAYERS, K = 10, 2, 3


def random_trace(num_experts=20) -> Trace:
    rng = np.random.default_rng(0)
    rows = STEPS * LAYERS
    ids_TK = np.stack([rng.permutation(num_experts)[:K] for _ in range(rows)])
    return Trace(
        num_experts=num_experts,
        top_k=K,
        request=np.zeros(rows, np.int32),
        phase=np.full(rows, DECODE, np.int32),
        step=np.repeat(np.arange(5, 5 + STEPS, dtype=np.int32), LAYERS),
        layer=np.tile(np.arange(LAYERS, dtype=np.int32), STEPS),
        ids_TK=ids_TK.astype(np.int32),
        weights_TK=np.full((rows, K), 1 / K, np.float32),
    )


def small_config(top_k=K):
    small = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = olmoe_config(3, "float32", experts=12) | small | heads
    return config_from_hf(config | {"num_experts_per_tok": top_k})


def test_distinct_takes_modulo_and_the_next_free_id():
    assert distinct([3, 15, 4], 12) == [3, 4, 5]
    assert distinct([11, 23], 12) == [11, 0]


def test_every_layer_repeats_the_trace():
    config = small_config()
    chosen_SLK = trace_choices(random_trace(), config)
    assert chosen_SLK.shape == (STEPS, 3, K)
    # The model has a layer more than the trace, which starts again.
    np.testing.assert_array_equal(chosen_SLK[:, 2], chosen_SLK[:, 0])
    reader = TracedReader(config, chosen_SLK, np.float32)
    engine = ResidentEngine(load_weights(reader))
    seen_SLK = np.zeros_like(chosen_SLK)
    session = engine.new_session(1, STEPS + 1)
    engine.prefill(session, [[0]])
    active_B = jax.device_put(np.ones(1, bool))
    for step in range(1, STEPS):
        token_B = jax.device_put(np.array([step], np.int32))

        def note(layer, routing, step=step):
            seen_SLK[step, layer] = np.asarray(routing.ids_TK)[0]

        engine.decode(session, token_B, active_B, note)
    np.testing.assert_array_equal(seen_SLK[1:], chosen_SLK[1:])


def test_a_trace_with_too_few_ranks_is_refused():
    with pytest.raises(ConfigError, match="3 experts a token"):
        trace_choices(random_trace(), small_config(top_k=4))
