"""Experts that the host computes while a device works: START and WAIT, and mode fused.

Asks what an empty START and WAIT cost, what 1 to 6 experts take of the host beside
products and what both take together, and whether a step with `offload.assist_in_fused`,
deferred too, is faster than one without, at batch 1, 50 and 25 %.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.kernels import assist
from moe_edge.model.record import RecordLayout

ON_GPU = jax.default_backend() == "gpu"
WIDTH, PRODUCTS = (8192, 6) if ON_GPU else (64, 2)
EXPERTS = (0, 1, 2, 4, 6)  # that the host computes at once
HELPED = {"assist": "two_pointer", "assist_in_fused": True}
WAYS = {
    "helped": HELPED,
    "deferred": HELPED | {"assist_deferred": True},
    "not helped": {},
}


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("assist", given)
    with report.attempt("alone and beside products"):
        _calls(report, model, given.rounds)
    for budget in ("50%", "25%"):
        with report.attempt(budget):
            common.compare_steps(
                *(budget, WAYS, report, model, given.rounds),
                judge=("from resident in deviations", common.apart),
                told=("report", Engine.report),
            )


@functools.partial(jax.jit, static_argnames=("layout", "limits", "helps", "computes"))
def _run(ids_TK, x_TD, host_ER, x_DD, *, layout, limits, helps: bool, computes: bool):
    y_DD, rows_PD = x_DD + 0, None
    if helps:
        given = ids_TK, x_TD, host_ER, layout, *limits
        under_way, (y_DD,) = assist.start(*given, [y_DD])
    for _ in range(PRODUCTS if computes else 0):
        y_DD = y_DD @ x_DD
    if helps:
        rows_PD, (y_DD,) = assist.wait(under_way, [y_DD])
    return rows_PD, y_DD


def _calls(report: common.Report, model: common.Model, rounds: int) -> None:
    """Times of the host's part, of products, and of both."""
    assist.open_calls()
    config = model.reader.config
    moe, layer = config.moe, config.moe_layers[0]
    fixed = {"layout": RecordLayout.of(config)}
    fixed |= {"limits": (moe.activation, moe.swiglu_limit)}
    x_TD = jnp.ones((1, config.d_model), jnp.float32)
    x_DD = jnp.full((WIDTH, WIDTH), 1e-4, jnp.bfloat16)

    def call(experts: int, helps: bool, computes: bool) -> float:
        ids_K = np.full(max(EXPERTS), moe.num_experts, np.int32)
        ids_K[:experts] = np.arange(experts)
        given = jnp.asarray(ids_K)[None], x_TD, model.hosts[layer], x_DD
        more = fixed | {"helps": helps, "computes": computes}
        return common.call_ms(lambda: _run(*given, **more))

    cases = {"products": (0, False, True)}
    for count in EXPERTS:
        cases[f"{count} experts"] = count, True, False
        cases[f"{count} experts and products"] = count, True, True
    runs = {name: lambda c=case: call(*c) for name, case in cases.items()}
    for run in runs.values():
        run()
    report.add("ms", common.in_turn(runs, rounds))
    both = cases[f"{max(EXPERTS)} experts and products"]
    profile = common.profile(lambda: [call(*both) for _ in range(4)], 4, top=6)
    report.add("both, profile", profile)


if __name__ == "__main__":
    main()
