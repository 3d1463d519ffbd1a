"""Bits of the resident engine's logits by layers a program, and of engines made twice.

Programs of 8 and of 16 layers differed at batch 8. XLA chooses products by timing them;
run this beside itself with XLA_FLAGS=--xla_gpu_autotune_level=0 and with
--xla_gpu_deterministic_ops=true, and compare what each says.
"""

import itertools
import os

import common

ENGINES = {"16": 16, "16 again": 16, "8": 8}  # layers a program
BATCHES = (1, 3, 8)


def main() -> None:
    parser = common.flags(__doc__)
    parser.add_argument("--name", default="bits", help="of the report")
    given = parser.parse_args()
    report, model = common.begin(given.name, given)
    report.add("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    engines = [model.resident(layers_per_program=each) for each in ENGINES.values()]
    firsts = [lambda e=engine: _logits(model, e) for engine in engines]
    found = dict(zip(ENGINES, common.at_once(firsts), strict=True))
    for (one, some), (other, others) in itertools.combinations(found.items(), 2):
        for batch in BATCHES:
            pair = some[batch], others[batch]
            result = [common.same(*pair), common.apart(*pair)]
            report.add(f"{one} and {other}, batch {batch}: same, apart", result)
    for name, logits in found.items():
        alone = logits[1]
        for batch in BATCHES[1:]:
            first = [each[:1] for each in logits[batch]]
            result = [common.same(first, alone), common.apart(first, alone)]
            report.add(f"{name}: row 0 alone and of {batch}: same, apart", result)


def _logits(model, engine) -> dict:
    return {batch: model.logits(engine, batch) for batch in BATCHES}


if __name__ == "__main__":
    main()
