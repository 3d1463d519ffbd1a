"""K of a row is data: in company of other K it gets what its operating point gives.

Over refactored models: blocks of a proxy gate's pattern are cut in the middle of a
token's choice, not at its end.
"""

import functools

import numpy as np
import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.sub_experts import split_config
from tests.support.layered import StoreReader
from tests.support.running import OPTIONS, SIZES, log_probs_of, row, run, tokens_of
from tests.support.tiny_models import GQA

SHARES = ((0.3, 0.2), (0.2, 0.1), (0.15, 0.05))
SPLITS = {
    "linear": split_config(GQA, 2),
    "global": split_config(GQA, 2, gate="proxy_global", gate_neurons=3),
    "pattern": split_config(
        GQA, 2, gate="proxy_pattern", gate_neurons=3, rank_shares=SHARES
    ),
}
LENGTHS = {1: 9, 2: 20, 4: 33, 6: 5}  # by K: of prompts
ROWS = [row(k, size, 8, k=k, top_logprobs=3) for k, size in LENGTHS.items()]
# The first two run together from the start, the others join.
ARRIVALS = [*zip((0, 0, 2, 3), ROWS, strict=True)]
COMPANY = SIZES | {"max_rows": 4}


@functools.cache
def resident(gate: str) -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(SPLITS[gate])))


@functools.cache
def alone(gate: str):
    """What each row gets by itself, from an engine whose K it is."""
    return {
        each.id: run(RowSlots(resident(gate).at_k(each.k), **SIZES), [(0, each)])
        for each in ROWS
    }


@pytest.mark.parametrize(
    ("gate", "mode"),
    [
        ("linear", "resident"),
        ("global", "resident"),
        ("pattern", "resident"),
        ("pattern", "layered"),
        ("pattern", "waves"),
        ("global", "fused"),
    ],
)
def test_rows_of_different_k_get_what_they_get_alone(gate, mode):
    engine = resident(gate)
    if mode != "resident":
        options = OffloadOptions(**OPTIONS[mode])
        engine = make_offloaded(StoreReader(SPLITS[gate]), options)
    with engine:
        got = run(RowSlots(engine, **COMPANY), ARRIVALS)
    for each in ROWS:
        expected = alone(gate)[each.id]
        assert tokens_of(got)[each.id] == tokens_of(expected)[each.id]
        np.testing.assert_allclose(
            log_probs_of(got)[each.id], log_probs_of(expected)[each.id], atol=2e-5
        )
    # The prompts differ, and so does what a K gives.
    other = RowSlots(resident(gate), **SIZES)
    swapped = run(other, [(0, row(2, LENGTHS[2], 8, k=6, top_logprobs=3))])
    assert np.abs(log_probs_of(swapped)[2] - log_probs_of(got)[2]).max() > 1e-3
