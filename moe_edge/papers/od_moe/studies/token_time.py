"""A shadow's time per token beside the resident model's, in the same rounds."""

import functools
import time
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from moe_edge.bench.engines import Bench
from moe_edge.bench.rounds import interleave, round_ratios
from moe_edge.engine.base import Engine
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine
from moe_edge.papers.od_moe.shadow.follower import Course, Follower, read_choices
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.recorded import Recorded, record
from moe_edge.papers.od_moe.studies.shadows import shadow_in

RESIDENT = "resident"
LIMITS = {"int8": 1.3, "nf4": 2.0}  # times the resident model's


def resident_token_s(engine: Engine, run: Recorded) -> float:
    """Median seconds of a decode step and of reading its token."""
    session, active_B = engine.new_session(1, run.capacity), jnp.ones(1, bool)
    engine.prefill(session, [run.prompt])
    steps_s = []
    for token_B in run.tokens:
        started_s = time.perf_counter()
        np.asarray(jnp.argmax(engine.decode(session, token_B, active_B), axis=-1))
        steps_s.append(time.perf_counter() - started_s)
    return float(np.median(steps_s))


def shadow_token_s(shadow: ShadowEngine, run: Recorded) -> float:
    """Median seconds of aligning, of a step, and of reading what it chooses."""
    periods = Shadow(shadow.precision)
    course = Course(Follower(shadow, 1, run.capacity), periods)
    course.begin([run.prompt])
    active_B, K, steps_s = jnp.ones(1, bool), run.chosen_NLK.shape[-1], []
    for token_B in run.tokens:
        started_s = time.perf_counter()
        read_choices(course.step(run.caches, token_B, active_B), 1, K)
        steps_s.append(time.perf_counter() - started_s)
    return float(np.median(steps_s[1:]))  # the first copies the prompt's keys


def token_ratios(
    bench: Bench, prompt, new_tokens: int, precisions: Sequence[str], rounds: int
) -> Mapping[str, list[float]]:
    """By precision, a round each: the shadow's time over the resident model's."""
    run = record(bench.resident, prompt, new_tokens)
    cases = {RESIDENT: functools.partial(resident_token_s, bench.resident, run)}
    for name in precisions:
        cases[name] = functools.partial(shadow_token_s, shadow_in(bench, name), run)
    found = interleave(cases, rounds)
    return {name: round_ratios(found[name], found[RESIDENT]) for name in precisions}
