"""A step's attention by one kernel (MOE_EDGE_DECODE_ATTENTION=1) or by XLA.

Asks which is faster where caches are long: positions near 512, 1,024 and 4,096, batch 1
and 8. Times are of a few layers; the caches hold zeros, which take as long as keys.
"""

import os
import time

import common
import jax
import numpy as np

from moe_edge.kernels import decode_attention, switches

STEPS = 16
CASES = ((512, 1), (4096, 1), (4096, 8), (512, 8), (1024, 1))  # capacity, batch


def main() -> None:
    given = common.flags(__doc__, layers=4).parse_args()
    report, model = common.begin("attention", given)
    engines = {}
    for capacity, batch in CASES:
        name = f"capacity {capacity} batch {batch}"
        with report.attempt(name):
            for kind in switches.OFF_ON:
                engine = engines.setdefault(kind, model.resident())
                os.environ[decode_attention.VARIABLE] = kind  # read in compilation
                _step_ms(model, engine, capacity, batch)
            ways = {"XLA": engines["0"], "one kernel": engines["1"]}
            cases = {
                way: lambda e=engine, c=capacity, b=batch: _step_ms(model, e, c, b)
                for way, engine in ways.items()
            }
            report.add(f"{name}, ms a step", common.in_turn(cases, given.rounds))
            for way, case in cases.items():
                run = common.profile(case, STEPS + 1, top=8)
                report.add(f"{name}, {way}, profile", run)


def _step_ms(model, engine, capacity: int, batch: int) -> float:
    """Mean of STEPS steps at the end of the caches."""
    session, active_B = engine.new_session(batch, capacity), common.everyone(batch)
    first = capacity - STEPS - 1
    session.positions_B = jax.device_put(np.full(batch, first, np.int32))
    token_B = model.tokens(batch, 0)
    engine.decode(session, token_B, active_B).block_until_ready()
    begun_s = time.perf_counter()
    for _ in range(STEPS):
        engine.decode(session, token_B, active_B).block_until_ready()
    return common.MS * (time.perf_counter() - begun_s) / STEPS


if __name__ == "__main__":
    main()
