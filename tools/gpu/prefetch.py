"""Records that travel while a layer computes: START and WAIT, and mode fused with them.

Asks at which rate a plan of records arrives alone, how much longer it and the products
beside it take together than the longer of the two, and whether a step with
`offload.prefetch_in_fused` is faster than one without, at batch 1, 25 and 50 %.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.kernels import prefetch
from moe_edge.offload.store import host_sharding

ON_GPU = jax.default_backend() == "gpu"
RECORD = 6291456 if ON_GPU else 4096  # values: of OLMoE-1B-7B
WIDTH, PRODUCTS = (8192, 6) if ON_GPU else (64, 2)
RECORDS = 8
EQUAL = {"slot_plan": "equal"}
WAYS = {
    "ahead": EQUAL | {"predictor": "stale_gate", "prefetch_in_fused": True},
    "not ahead": EQUAL,
}


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("prefetch", given)
    with report.attempt("alone and beside products"):
        _calls(report, given.rounds)
    for budget in ("50%", "25%"):
        with report.attempt(budget):
            common.compare_steps(
                *(budget, WAYS, report, model, given.rounds),
                judge=("bits of resident", common.same),
                told=("moved in all", _moved),
            )


@functools.partial(jax.jit, static_argnames=("copies", "computes"), donate_argnums=1)
def _run(plan_2P, slots_SR, host_ER, x_DD, *, copies: bool, computes: bool):
    plan_2P = plan_2P + 0  # a program's own
    if copies:
        plan_2P, slots_SR, (x_DD,) = prefetch.start(plan_2P, slots_SR, host_ER, [x_DD])
    y_DD = x_DD
    for _ in range(PRODUCTS if computes else 0):
        y_DD = y_DD @ x_DD
    if copies:
        slots_SR, (y_DD,) = prefetch.wait(plan_2P, slots_SR, [y_DD])
    return slots_SR, y_DD


def _calls(report: common.Report, rounds: int) -> None:
    """Times of copies, of products, and of both."""
    prefetch.open_calls()
    numbers_R = np.arange(RECORDS, dtype=np.int32)
    plan_2P = jnp.asarray(np.stack([numbers_R, numbers_R[::-1]]))
    host = np.broadcast_to(numbers_R[:, None], (RECORDS, RECORD))
    host_ER = jax.device_put(host.astype(jnp.bfloat16), host_sharding())
    slots = [jnp.zeros((RECORDS, RECORD), jnp.bfloat16)]
    x_DD = jnp.full((WIDTH, WIDTH), 1e-4, jnp.bfloat16)

    def call(copies: bool, computes: bool) -> float:
        def run():
            given = plan_2P, slots.pop(), host_ER, x_DD
            found = _run(*given, copies=copies, computes=computes)
            slots.append(found[0])
            return found

        return common.call_ms(run)

    both = {"copies": (True, False), "products": (False, True), "both": (True, True)}
    cases = {name: lambda c=case: call(*c) for name, case in both.items()}
    for case in cases.values():
        case()
    arrived = np.asarray(slots[0][:, 0], np.float32)
    report.add("records arrived", bool((arrived == numbers_R[::-1]).all()))
    report.add("ms", common.in_turn(cases, rounds))
    report.add("GB", RECORDS * RECORD * 2 / 1e9)
    run = common.profile(lambda: [call(True, True) for _ in range(4)], 4, top=6)
    report.add("both, profile", run)


def _moved(engine: Engine) -> dict:
    return engine.moved()._asdict() | {"hit_ratio": engine.movement()["hit_ratio"]}


if __name__ == "__main__":
    main()
