"""Mode fused: absent experts computed while they arrive, against the loop over them.

Asks whether `offload.zero_copy` is faster at 50 and 25 %, batch 1 and 8, and how far
both are from the larger of the resident engine's step and the missed bytes.
"""

import common

from moe_edge.studies.speed.rates import link_rate

WAYS = ("fused zero copy", "fused")
BATCHES = (1, 8)


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("zero_copy", given)
    resident = model.resident()
    want = {batch: model.logits(resident, batch) for batch in BATCHES}
    report.say("resident engine compiled")
    link = link_rate()
    report.add("link_bytes_per_s", link)
    report.say("records pinned:", len(model.hosts), "layers")
    for budget in ("50%", "25%"):
        with report.attempt(budget):
            _at(budget, report, model, resident, want, link, given.rounds)


def _at(budget, report, model, resident, want, link, rounds) -> None:
    """Bits, times and what missed, of both ways at one budget."""
    engines = {}
    for way in WAYS:
        with report.attempt(f"{budget} {way}"):
            engines[way] = model.offloaded(way, budget)
    moved = {}

    def step(way, batch):
        took_ms = model.step_ms(engines.get(way, resident), batch)
        if way in engines:
            moved[way, batch] = engines[way].movement()
        return took_ms

    for batch in BATCHES:
        firsts = [lambda e=e, b=batch: model.logits(e, b) for e in engines.values()]
        for way, got in zip(engines, common.at_once(firsts), strict=True):
            same = common.same(got, want[batch])
            report.add(f"{budget} batch {batch}: {way}, bits of resident", same)
        cases = {way: lambda w=way, b=batch: step(w, b) for way in (*engines, "")}
        found = common.in_turn(cases, rounds)
        report.add(f"{budget} batch {batch}: resident, ms a step", found.pop(""))
        for way, step_ms in found.items():
            seen = moved[way, batch]
            step_bytes = seen["bytes_moved"] / common.traced_cases.STEPS[batch]
            result = {
                "ms": step_ms,
                "missed_ms": common.MS * step_bytes / link,
                "hit_ratio": seen["hit_ratio"],
            }
            report.add(f"{budget} batch {batch}: {way}", result)
    steps = 2 * common.traced_cases.STEPS[1]
    for way, engine in engines.items():
        with report.attempt(f"{budget} batch 1: {way}, profile"):
            run = common.profile(lambda e=engine: model.step_ms(e, 1), steps)
            report.add(f"{budget} batch 1: {way}, profile", run)
        engine.close()


if __name__ == "__main__":
    main()
