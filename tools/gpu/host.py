"""A resident step at batch 1: what the host does while the GPU is idle.

A step of one program took 1.8 ms where the GPU worked .97. Asks what handing over some
250 arrays costs, what making the tokens and waiting cost, whether the GPU rests between
kernels or between steps, and what is left if steps are dispatched ahead.
"""

import cProfile
import io
import pstats
import time

import common
import jax

STEPS = 32


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("host", given)
    engine = model.resident()
    model.step_ms(engine, 1)
    report.say("compiled")
    cases = {
        "each waited for": lambda: model.step_ms(engine, 1),
        "ahead": lambda: _ahead_ms(model, engine),
        "ahead, tokens made before": lambda: _ahead_ms(model, engine, made=True),
    }
    report.add("ms a step", common.in_turn(cases, given.rounds))
    report.add("parts of a step, us", _parts(model, engine))
    with report.attempt("empty programs"):
        report.add("empty programs, us", _empty(model, engine))
    with report.attempt("profile"):
        steps = 2 * common.traced_cases.STEPS[1]
        run = common.profile(lambda: model.step_ms(engine, 1), steps, host=True)
        report.add("profile", run)
    report.add("Python", _python(model, engine))
    with report.attempt("compiled call"):
        report.add("compiled call, us", _compiled(model, engine))


def _session(model, engine):
    session = engine.new_session(1, 2 * STEPS)
    engine.decode(session, model.tokens(1, 0), common.everyone(1)).block_until_ready()
    return session


def _ahead_ms(model, engine, made: bool = False) -> float:
    """Of a step, where only the last is waited for."""
    session, active_B = _session(model, engine), common.everyone(1)
    tokens = [model.tokens(1, step) for step in range(STEPS)] if made else None
    begun_s = time.perf_counter()
    for step in range(STEPS):
        token_B = tokens[step] if made else model.tokens(1, step)
        logits = engine.decode(session, token_B, active_B)
    logits.block_until_ready()
    return common.MS * (time.perf_counter() - begun_s) / STEPS


def _parts(model, engine) -> dict:
    """Medians, one after another: tokens, the call, waiting for its logits."""
    session, active_B = _session(model, engine), common.everyone(1)
    found: dict[str, list[float]] = {"tokens": [], "call": [], "wait": []}
    for step in range(STEPS):
        marks = [time.perf_counter()]
        token_B = model.tokens(1, step)
        marks.append(time.perf_counter())
        logits = engine.decode(session, token_B, active_B)
        marks.append(time.perf_counter())
        logits.block_until_ready()
        marks.append(time.perf_counter())
        for name, begun, end in zip(found, marks, marks[1:], strict=False):
            found[name].append(1e6 * (end - begun))
    return {name: sorted(took)[STEPS // 2] for name, took in found.items()}


def _empty(model, engine) -> dict:
    """Calls of programs that compute nothing of the step's own arrays."""
    weights, session = engine.weights, _session(model, engine)
    taken = weights.top, weights.layers, weights.experts, engine._windows
    token_B = model.tokens(1, 0)
    take = jax.jit(lambda arrays, token_B: token_B + 1, keep_unused=True)
    give = jax.jit(lambda caches: caches, donate_argnums=0)
    caches = session.caches

    def give_back():
        nonlocal caches
        caches = give(caches)
        return caches

    for arrays in (taken, caches, ()):
        take(arrays, token_B).block_until_ready()
    jax.block_until_ready(give_back())
    return {
        f"takes {len(jax.tree.leaves(taken))} weights": common.call_us(
            lambda: take(taken, token_B)
        ),
        f"takes {len(jax.tree.leaves(caches))} caches": common.call_us(
            lambda: take(caches, token_B)
        ),
        "takes one array": common.call_us(lambda: take((), token_B)),
        "takes and returns the caches": common.call_us(give_back),
        "puts the token": common.call_us(lambda: model.tokens(1, 1)),
    }


def _compiled(model, engine) -> float:
    """The call of the step's program without `jit`'s own dispatch."""
    weights, session = engine.weights, _session(model, engine)
    given = weights.top, weights.layers, weights.experts, engine._windows
    tokens = model.tokens(1, 0), session.positions_B, common.everyone(1)
    parts = *given, tokens, session.k_B
    program = engine.programs.decode.lower(*parts, session.caches).compile()
    caches = session.caches

    def step():
        nonlocal caches
        logits, _, caches, _ = program(*parts, caches)
        return logits

    step().block_until_ready()
    return common.call_us(step, STEPS)


def _python(model, engine, lines: int = 16) -> list[str]:
    """The functions that take most of the host's time."""
    profile, text = cProfile.Profile(), io.StringIO()
    profile.runcall(model.step_ms, engine, 1)
    stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime")
    stats.print_stats(lines)
    return [line.strip() for line in text.getvalue().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
