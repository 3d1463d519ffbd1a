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

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.kernels import assist
from moe_edge.model.record import RecordLayout

ON_GPU = jax.default_backend() == "gpu"
WIDTH, PRODUCTS = (8192, 6) if ON_GPU else (64, 2)
EXPERTS = (0, 1, 2, 4, 6)  # that the host computes at once
HELPED = {"assist": "two_pointer", "assist_in_fused": True}
WAYS = {"helped": HELPED, "deferred": HELPED | {"assist_deferred": True}}


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report, model = common.begin("assist", given)
    with report.attempt("alone and beside products"):
        _calls(report, model, given.rounds)
    for budget in ("50%", "25%"):
        with report.attempt(budget):
            _steps(budget, report, model, given.rounds)


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


def _steps(budget, report, model, rounds) -> None:
    """Distance, times and what moved, of steps with the host's help and without."""
    engines, want = {}, model.logits(model.resident(), 1)
    for name, more in (WAYS | {"not helped": {}}).items():
        options = OffloadOptions(
            device_memory=budget, mode="fused", zero_copy=ON_GPU, **more
        )
        given = options, model.dense, model.plain_store
        engines[name] = assemble(*given, hosts=model.hosts)
        apart = common.apart(model.logits(engines[name], 1), want)
        report.add(f"{budget} {name}, from resident in deviations", apart)
    cases = {
        name: lambda e=engine: model.step_ms(e, 1) for name, engine in engines.items()
    }
    report.add(f"{budget}, ms a step", common.in_turn(cases, rounds))
    for name, engine in engines.items():
        report.add(f"{budget} {name}, report", engine.report())
        engine.close()


if __name__ == "__main__":
    main()
