"""Bits of the resident engine's logits by layers a program, and of engines made twice.

Programs of 8 and of 16 layers differed at batch 8. XLA chooses products by timing them;
run this beside itself with XLA_FLAGS=--xla_gpu_autotune_level=0 and with
--xla_gpu_deterministic_ops=true, and compare what each says.
"""

import itertools
import os

import common

ENGINES = {"16": 16, "16 again": 16, "8": 8}  # layers a program
BATCHES = (8, 1, 3)


def main() -> None:
    parser = common.flags(__doc__)
    parser.add_argument("--name", default="bits", help="of the report")
    given = parser.parse_args()
    report, model = common.begin(given.name, given)
    report.add("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    engines = [model.resident(layers_per_program=each) for each in ENGINES.values()]
    found: dict[int, dict] = {}
    for batch in BATCHES:
        firsts = [lambda e=engine, b=batch: model.logits(e, b) for engine in engines]
        found[batch] = dict(zip(ENGINES, common.at_once(firsts), strict=True))
        pairs = itertools.combinations(found[batch].items(), 2)
        for (one, some), (other, others) in pairs:
            result = [common.same(some, others), common.apart(some, others)]
            report.add(f"{one} and {other}, batch {batch}: same, apart", result)
    for name, alone in found[1].items():
        for batch in (8, 3):
            first = [each[:1] for each in found[batch][name]]
            result = [common.same(first, alone), common.apart(first, alone)]
            report.add(f"{name}: row 0 alone and of {batch}: same, apart", result)


if __name__ == "__main__":
    main()
