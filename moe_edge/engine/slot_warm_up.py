"""Runs every program of a running batch once, so that serving compiles nothing."""

import itertools
import time

import jax
import numpy as np

from moe_edge.core.progress import progress
from moe_edge.engine.base import Engine
from moe_edge.engine.prompt_cache import PromptCache
from moe_edge.engine.sizes import capacity_for
from moe_edge.engine.slot_programs import SlotPrograms, SlotShapes
from moe_edge.model.row_sampling import make_rules
from moe_edge.model.sampling import Sampling


def warm_up(
    engine: Engine, programs: SlotPrograms, shapes: SlotShapes, cache: PromptCache
) -> float:
    """Compiles all shapes of steps, prompts and copies; returns its seconds.

    Steps and prompts run as if their experts did not fit the slots, and with one token
    at K 1, whose one expert does: an engine with few slots has programs for either.
    """
    started_s = time.perf_counter()
    running = [*itertools.product(shapes.rows, shapes.capacities)]
    prompts = shapes.prompt_shapes()
    for B, M in progress(running, "compiling decode steps"):
        _decode(engine, programs, shapes.new_session(engine, B, M))
    for R, size, M in progress(prompts, "compiling prompts"):
        _prefill(engine, programs, shapes.new_session(engine, R, M), size)
    kept = []
    if cache.budget_bytes:
        tokens = range(1, shapes.max_context + 1)
        kept = [(1, capacity_for(shapes.kept_capacity(count))) for count in tokens]
    copied_shapes = dict.fromkeys([*running, *((R, M) for R, _, M in prompts), *kept])
    for shape in progress(copied_shapes, "compiling copies of caches"):
        for layer in dict.fromkeys(engine.programs.kinds):
            here, there = (engine.new_cache(layer, *shape) for _ in range(2))
            copied = programs.copy_rows(layer, here, there, [(0, 0, 1)], shapes.part)
            jax.block_until_ready(copied)
    return time.perf_counter() - started_s


def _tokens(engine: Engine, shape) -> np.ndarray:
    """Tokens that differ, so that many experts are chosen."""
    drawn = np.random.default_rng(0).integers(0, engine.config.vocab_size, shape)
    return drawn.astype(np.int32)


def _ks(engine: Engine, rows: int, size: int = 1):
    """(K of every row, bool [rows, size]: tokens that are computed): all at the model's
    K, then one token at K 1."""
    first = np.zeros((rows, size), bool)
    first[0, 0] = True
    with engine.crowded():
        yield np.full(rows, engine.config.moe.top_k, np.int32), np.ones_like(first)
    yield np.ones(rows, np.int32), first


def _decode(engine, programs, session) -> None:
    B, put = len(session.lengths), engine.put
    tokens_B = put(_tokens(engine, B))
    for k_B, valid_B1 in _ks(engine, B):
        active_B = valid_B1[:, 0]
        session.positions_B = put(np.array(session.lengths, np.int32))
        session.k_B, session.growth = put(k_B), active_B.astype(int).tolist()
        rules = put(make_rules([(Sampling(temperature=1.0), 0)] * B))
        for _ in range(2):  # once with arrays of the host, once with a program's
            logits_BV = engine.decode(session, tokens_B, put(active_B))
            tokens_B = programs.greedy(_guided(engine, programs, logits_BV))
            programs.log_probs(logits_BV, tokens_B)
            _, rules = programs.draw(logits_BV, rules)
    np.asarray(tokens_B)


def _guided(engine, programs, logits_BV):
    """The logits where a grammar allows every token."""
    shape = len(logits_BV), -(-logits_BV.shape[1] // 32)
    return programs.allow(logits_BV, engine.put(np.full(shape, ~np.uint32(0))))


def _prefill(engine, programs, session, size: int) -> None:
    R, top = len(session.lengths), engine.programs.top
    tokens, start_B = _tokens(engine, (R, size)), np.zeros(R, np.int32)
    engine.begin_prompts(session, tokens.tolist())
    for k_B, valid_RS in _ks(engine, R, size):
        session.k_B = engine.put(k_B)
        x_BSD = engine.run_chunk(session, tokens, valid_RS, start_B)
        logits_BV = top.last_head(engine.weights.top, x_BSD, engine.put(start_B))
        tokens_B = programs.greedy(_guided(engine, programs, logits_BV))
        programs.log_probs(logits_BV, tokens_B)
        row_next = engine.put((np.int32(0), tokens[0]))
        programs.prompt_log_probs(engine.weights.top, x_BSD, *row_next)
        rules = make_rules([(Sampling(temperature=1.0), 0)] * R)
        programs.draw(logits_BV, engine.put(rules))
    np.asarray(tokens_B)
