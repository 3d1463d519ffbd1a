"""Families whose parts `tiny_models` lacks run alike in every kind of engine."""

import numpy as np
import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.kernels import native
from tests.support.layered import StoreReader, forced_logits
from tests.support.running import SIZES, log_probs_of, run
from tests.support.tiny_checkpoints import FAMILIES, REMOTE_CODE, raw_config
from tests.support.tiny_models import random_prompts, score_all

# In `tiny_models` by their parts.
_KNOWN = {"olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *REMOTE_CODE}
_KNOWN |= {"deepseek_v2", "deepseek_v3"}
_KNOWN |= {"qwen3_5_moe_text"}  # qwen3_next, but for how products are packed
LENGTH, STEPS = 40, 12


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in _KNOWN])
def test_every_engine_has_the_bits_of_the_resident_one(family):
    config = config_from_hf(raw_config(family))
    engine = ResidentEngine(load_weights(StoreReader(config)))
    prompts = random_prompts(config, [LENGTH])
    resident = forced_logits(engine, prompts, STEPS)
    # Decoding is prefill, within the tolerance of two kernels.
    forced = random_prompts(config, [STEPS], seed=1)
    full = score_all(engine, [prompts[0] + forced[0]])[0]
    difference = np.abs(resident[:, 0] - full[LENGTH - 1 :]).max()
    assert difference <= 1e-5 * full.std()
    # Half of the experts in slots: the same bits.
    for mode in ("layered", "fused"):
        options = OffloadOptions(device_memory="50%", mode=mode)
        offloaded = make_offloaded(StoreReader(config), options)
        np.testing.assert_array_equal(
            forced_logits(offloaded, prompts, STEPS), resident, err_msg=mode
        )
        offloaded.close()
    if config.has_states:  # prompts: tests/engine/test_states.py
        return
    # A prompt whose beginning is cached has the bits of a fresh one; by native kernels
    # also of one that is not cut (products of latents are XLA's).
    first = SlotRow(id="first", prompt=tuple(prompts[0]), max_new_tokens=2)
    again = SlotRow(
        id="again", prompt=first.prompt[:37] + (1, 2), max_new_tokens=5, top_logprobs=2
    )
    found = []
    for chunk, cached in ((16, 10**6), (16, 0), (48, 0)):
        sizes = SIZES | {"prefill_chunk": chunk, "prompt_cache_bytes": cached}
        slots = RowSlots(engine, deterministic=True, **sizes)
        run(slots, [(0, first)])
        assert slots.cached_tokens(again.prompt) == (32 if cached else 0)
        found.append(log_probs_of(run(slots, [(0, again)]))["again"])
    cached, fresh, uncut = found
    np.testing.assert_array_equal(cached, fresh)
    is_native = native.choice() == "native" and config.attention.kind == "gqa"
    tolerance = 0 if is_native else 1e-5
    np.testing.assert_allclose(uncut, fresh, rtol=0, atol=tolerance)
