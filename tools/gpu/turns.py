"""A prompt of 512 tokens in mode fused whose next experts travel while others compute.

Asks whether `offload.overlap_in_fused` is faster than the loop at 50 and 25 %, how far
it is from the larger of the resident prompt and the missed bytes at the link's rate,
and whether four parts of the slots are better than two.
"""

import common
import jax
import numpy as np

from moe_edge.engine import fused_turns
from moe_edge.engine.base import Engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble

# Name -> parts of the slots; None: the loop.
WAYS = {"loop": None, "turns": fused_turns.PARTS, "four parts": 4}
PROMPT = common.traced_cases.PROMPT


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("turns", given)
    resident = model.resident()
    want = _logits(resident, model)
    for budget in ("50%", "25%"):
        with report.attempt(budget):
            _compare(report, model, budget, given.rounds, resident, want)


def _compare(
    report: common.Report,
    model: common.Model,
    budget: str,
    rounds: int,
    resident: Engine,
    want: list[np.ndarray],
) -> None:
    engines = {"resident": resident}
    for name, parts in WAYS.items():
        options = OffloadOptions(
            device_memory=budget,
            mode="fused",
            zero_copy=jax.default_backend() == "gpu",
            overlap_in_fused=parts is not None,
        )
        given = options, model.dense, model.plain_store
        engines[name] = assemble(*given, hosts=model.hosts)
        fused_turns.PARTS = parts or fused_turns.PARTS  # read in compilation
        same = common.same(_logits(engines[name], model), want)
        report.add(f"{budget} {name}, bits of resident", same)
    cases = {
        name: lambda e=engine: common.traced_cases.prefill_ms(e, model.steps)
        for name, engine in engines.items()
    }
    report.add(f"{budget}, ms", common.in_turn(cases, rounds))
    for name in WAYS:
        report.add(f"{budget} {name}, GB a prompt", engines[name].moved().bytes / 1e9)
        report.add(f"{budget} {name}, profile", common.profile(cases[name], 1, top=8))
        engines[name].close()


def _logits(engine: Engine, model: common.Model) -> list[np.ndarray]:
    """Float32 `[1, V]` behind the prompt."""
    prompt = (np.arange(PROMPT) % model.steps).tolist()
    session = engine.new_session(1, PROMPT)
    return [np.asarray(engine.prefill(session, [prompt]))]


if __name__ == "__main__":
    main()
