"""A prompt of 512 tokens through the resident engine: which kernels it spends time in.

It took 12.5 ms, of which the GPU worked 9.3 in 707 launches: experts 5.3, float32
products of attention 1.0. Asks where the other 3.2 ms are, and what more parts cost.
"""

import os

import common

from moe_edge.kernels import grouped


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("prompt", given)
    cases = {}
    for parts in ("1", "2"):
        engine = model.resident()
        os.environ[grouped.VARIABLE] = parts  # read in compilation
        cases[parts] = lambda e=engine: common.traced_cases.prefill_ms(e, model.steps)
        cases[parts]()
        report.say("compiled")
    report.add("ms by parts", common.in_turn(cases, given.rounds))
    report.add("profile", common.profile(cases["1"], 1, top=30))


if __name__ == "__main__":
    main()
