"""Mode layered in its three ways: arrays, packed, direct (`offload.layer_io`).

Asks how much a layer's cut costs, in steps of the trace and where the same token comes
again and again, so that nothing travels; and where the host's time goes. The aim is
.25 ms a layer over the resident engine and the missed bytes.
"""

import statistics
import time

import common

WAYS = {"arrays": "layered", "packed": "layered packed", "direct": "layered direct"}
# What Python calls in a layer: where in the engine, by which name.
INSIDE = {
    "read": lambda engine: (engine._reader, "read"),
    "advance": lambda engine: (engine._steps, "advance"),
    "wait": lambda engine: (engine.queue, "wait"),
    "commit": lambda engine: (engine._slots, "commit"),
    "request": lambda engine: (engine.queue, "request_all"),
}


def main() -> None:
    given = common.flags(__doc__, layers=4).parse_args()
    report, model = common.begin("layered", given)
    engines = {"resident": model.resident()}
    programs = None
    for budget in ("50%", "25%"):
        for name, way in WAYS.items():
            with report.attempt(f"{budget} {name}"):
                engine = model.offloaded(way, budget, programs)
                programs = engine.programs
                engines[f"{budget} {name}"] = engine
    report.say("engines")
    batches = {name: (1,) if name.startswith("25%") else (1, 8) for name in engines}
    want = {}
    for name, engine in engines.items():
        with report.attempt(name):
            for batch in batches[name]:
                got = model.logits(engine, batch)
                want.setdefault(batch, got)
                same = common.same(got, want[batch])
                report.add(f"{name} batch {batch}: bits of resident", same)
    _hits(report, model, engines, given.rounds)
    _traced(report, model, engines, batches, given.rounds)
    for name in [each for each in engines if each.startswith("50%")]:
        with report.attempt(f"{name} inside"):
            report.add(f"{name} inside, us", _inside(model, engines[name]))
    for engine in engines.values():
        engine.close()


def _over(report, what: str, found: dict, model) -> None:
    """Times, and what a layer takes more than a resident one."""
    base_ms = statistics.median(found["resident"])
    layers = len(model.reader.config.moe_layers)
    for name, step_ms in found.items():
        over = (statistics.median(step_ms) - base_ms) / layers
        report.add(f"{what}: {name}", {"ms": step_ms, "over_resident_a_layer": over})


def _hits(report, model, engines: dict, rounds: int) -> None:
    """The pure cost of the cut: nothing travels."""
    cases = {
        name: lambda e=engine: _same_token_ms(model, e)
        for name, engine in engines.items()
        if not name.startswith("25%")
    }
    _over(report, "all hits", common.in_turn(cases, rounds), model)


def _same_token_ms(model, engine, count: int = 32) -> float:
    session = engine.new_session(1, 2 * count)
    token_B, active_B = engine.put((model.tokens(1, 0), common.everyone(1)))
    took = []
    for _ in range(count):
        begun_s = time.perf_counter()
        engine.decode(session, token_B, active_B).block_until_ready()
        took.append(time.perf_counter() - begun_s)
    return common.MS * statistics.median(took[8:])


def _traced(report, model, engines, batches, rounds) -> None:
    for batch in (1, 8):
        cases = {
            name: lambda e=engine, b=batch: model.step_ms(e, b)
            for name, engine in engines.items()
            if batch in batches[name]
        }
        found = common.in_turn(cases, rounds)
        _over(report, f"batch {batch}", found, model)
        for name in cases:
            moved = engines[name].movement()
            moved["steps"] = common.traced_cases.STEPS[batch]
            report.add(f"batch {batch}: {name}, moved", moved)


def _inside(model, engine) -> dict:
    """Median microseconds of a call and calls a step, by what Python waits in."""
    spent: dict[str, list[float]] = {}
    undo = []
    for name, find in INSIDE.items():
        try:
            owner, attribute = find(engine)
            call = getattr(owner, attribute)
            setattr(owner, attribute, _clocked(call, spent.setdefault(name, [])))
        except AttributeError:  # this way has no such call
            continue
        undo.append((owner, attribute, call))
    model.step_ms(engine, 1)
    for owner, attribute, call in undo:
        setattr(owner, attribute, call)
    steps = 2 * common.traced_cases.STEPS[1]
    return {
        name: [1e6 * statistics.median(took), len(took) / steps]
        for name, took in spent.items()
        if took
    }


def _clocked(call, took: list):
    def run(*args, **options):
        begun_s = time.perf_counter()
        result = call(*args, **options)
        took.append(time.perf_counter() - begun_s)
        return result

    return run


if __name__ == "__main__":
    main()
