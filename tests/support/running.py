"""Rows in slots of tiny engines, and the tokens that each gets alone."""

import dataclasses
import functools

import numpy as np

from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.kv_cache import STATES as STATE_NAMES
from tests.support.layered import StoreReader
from tests.support.tiny_models import (
    GPT_OSS,
    GQA,
    MIXED,
    MLA,
    STATES,
    random_prompts,
)

_ONE_HEAD = dataclasses.replace(GQA.attention, num_kv_heads=1)
MODELS = {
    "gqa": GQA,
    "mla": MLA,
    "one_head": dataclasses.replace(GQA, attention=_ONE_HEAD),
    "gpt_oss": GPT_OSS,
    "mixed": MIXED,
    "states": STATES,
}
OPTIONS = {
    # A record for each row, where rows join and leave.
    "layered": {"device_memory": "50%", "predictor": "previous"},
    # Blocks are carried by a thread.
    "threaded": {"device_memory": "50%", "memory": "pinned"},
    # Fewer slots than a step chooses: 4.
    "waves": {"device_memory": "17%", "predictor": "stale_gate"},
    "fused": {"device_memory": "50%", "mode": "fused"},
}
SIZES = {"max_rows": 2, "max_context": 64, "prefill_chunk": 16, "prompt_rows": 2}


@functools.cache
def resident(name: str) -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(MODELS[name])))


@functools.cache
def engine_of(mode: str, name: str):
    """Engines are shared: most of a test's time is compilation."""
    if mode == "resident":
        return resident(name)
    return make_offloaded(StoreReader(MODELS[name]), OffloadOptions(**OPTIONS[mode]))


def row(id, length: int, new: int, **options) -> SlotRow:
    """A row with a random prompt of its own."""
    (prompt,) = random_prompts(GQA, [length], seed=100 + length)
    return SlotRow(id=id, prompt=tuple(prompt), max_new_tokens=new, **options)


def alone(name: str, row: SlotRow) -> list[int]:
    """Its greedy tokens, by an engine made for its K."""
    return _alone(name, row.prompt, row.max_new_tokens, row.k)


@functools.cache
def _alone(name: str, prompt: tuple[int, ...], new: int, k: int | None) -> list[int]:
    return generate(resident(name).at_k(k), [prompt], new).tokens[0]


def run(slots: RowSlots, arrivals, leave=()) -> dict:
    """id -> its NewTokens.

    Args:
      arrivals: rows by the step before which they are admitted; a row waits for a slot.
      leave: (id, after so many tokens).
    """
    leave, got, step = dict(leave), {}, 0
    waiting = sorted(arrivals, key=lambda pair: pair[0])
    while waiting or slots.num_rows:
        while waiting and waiting[0][0] <= step:
            if slots.num_rows == slots.shapes.max_rows:
                break
            slots.admit([waiting.pop(0)[1]])
        for new in slots.step():
            got.setdefault(new.id, []).append(new)
        for id, news in got.items():
            if id in slots.ids:
                most = leave.get(id, slots[id].max_new_tokens)
                if len(news) >= most:
                    slots.release(id)
        step += 1
        assert step < 500
    return got


def tokens_of(got) -> dict:
    return {id: [new.token for new in news] for id, news in got.items()}


def log_probs_of(got) -> dict:
    """id -> float64 array of every number that was reported."""
    return {id: numbers_of([new.score for new in news]) for id, news in got.items()}


def numbers_of(scores) -> np.ndarray:
    return np.array([(score.logprob, *(x for _, x in score.top)) for score in scores])


def states_of(session, row=0) -> list[np.ndarray]:
    """Those of a row, of all layers."""
    return [
        np.asarray(array)[row]
        for cache in session.caches
        for name, array in cache.items()
        if name in STATE_NAMES
    ]
