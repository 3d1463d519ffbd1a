"""Kernels of a decode step alone: few rows' tiles, absent experts, the look-up.

Asks which tile reads weights fastest, or our own CUDA kernel, how many programs a link
needs for what is absent while others take what is there, and what a look-up costs.
Experts of OLMoE-1B-7B's size in bfloat16, several layers in a program, so that launches
do not count.
"""

import contextlib
import functools
import itertools
import os

import common
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_lookup import look_up
from moe_edge.kernels import few, few_floats, native
from moe_edge.kernels.few_work import Tile
from moe_edge.kernels.lookup import Ahead
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.store import host_sharding

ON_GPU = jax.default_backend() == "gpu"
WIDTH, NEURONS, EXPERTS, TOP_K = (2048, 1024, 64, 8) if ON_GPU else (32, 32, 4, 2)
TOKENS = (1, 4, 8) if ON_GPU else (1,)
ACT = functools.partial(activate, kind="silu", limit=None)
LAYOUT = RecordLayout(WIDTH, NEURONS)
# Outputs and warps; None: those of `few_floats.tile_of`.
TILES = (None, Tile(1, 1), *((Tile(4, 4), Tile(8, 8)) if ON_GPU else ()))
PROGRAMS = (16, 32, 64, 128) if ON_GPU else (2, 64)  # for what is absent


def main() -> None:
    given = common.flags(__doc__).parse_args()
    report = common.Report("kernels", given.out_dir)
    report.add("layers", given.layers)
    for part in (_tiles, _absent, _cuda, _look_up):
        with report.attempt(part.__name__):
            part(report, given.layers, given.rounds)


def _records(seed: int):
    values = np.random.default_rng(seed).standard_normal((EXPERTS, LAYOUT.size))
    return (0.02 * values).astype(ml_dtypes.bfloat16)


def _tiles(report, layers: int, rounds: int) -> None:
    layers_LER = [jax.device_put(_records(seed)) for seed in range(layers)]
    for tokens in TOKENS:
        given = *_choice(tokens), layers_LER
        cases = {f"{tile or 'own'}": _timed_tile(tile, layers, given) for tile in TILES}
        for case in cases.values():
            case()  # compiles
        name = f"tiles, {tokens} tokens"
        report.add(f"{name}, us a layer", common.in_turn(cases, rounds))
        experts = len(np.unique(np.asarray(given[1])))
        report.add(f"{name}, bytes a layer", 2 * LAYOUT.size * experts)


def _choice(tokens: int):
    rng = np.random.default_rng(tokens)
    x_TD = rng.standard_normal((tokens, WIDTH), np.float32)
    ids_TK = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]
    return jax.device_put((x_TD, np.array(ids_TK, np.int32)))


def _timed_tile(tile: Tile | None, layers: int, given):
    @jax.jit
    @native.within
    def run(x_TD, ids_TK, layers_LER):
        own = few_floats.tile_of
        if tile is not None:  # while it is traced
            few_floats.tile_of = lambda width, matrices, itemsize: tile
        try:
            for records_ER in layers_LER:
                rows = few.plan(ids_TK, EXPERTS)
                y_PD, _ = few.ffn(x_TD, records_ER, rows, TOP_K, LAYOUT, ACT)
                x_TD = x_TD + y_PD.reshape(*ids_TK.shape, WIDTH).sum(axis=1)
            return x_TD
        finally:
            few_floats.tile_of = own

    return lambda: 1e3 * common.call_ms(lambda: run(*given)) / layers


def _absent(report, layers: int, rounds: int) -> None:
    """One layer's records serve all: what is read over the link is cached nowhere."""
    host = _records(0)
    host_ER = jax.device_put(host, host_sharding()) if ON_GPU else jax.device_put(host)
    x_TD, ids_TK = _choice(1)
    for absent in (0, TOP_K // 2, TOP_K):
        host_TK = np.where(np.arange(TOP_K) < absent, ids_TK, -1).astype(np.int32)
        cases = {}
        for programs in PROGRAMS:
            run = _bring(programs, layers, (x_TD, ids_TK, jax.device_put(host_TK)))
            slots = [jax.device_put(host)]
            run(slots, host_ER)  # compiles
            cases[f"{programs}"] = lambda r=run, s=slots: r(s, host_ER)
        name = f"absent {absent} of {TOP_K}"
        report.add(f"{name}, us a layer", common.in_turn(cases, rounds))
        report.add(f"{name}, bytes over the link", 2 * LAYOUT.size * absent)
        if ON_GPU:
            report.add(f"{name}, profile", common.profile(cases["64"], 4 * layers, 4))


def _bring(programs: int, layers: int, choice):
    @functools.partial(jax.jit, donate_argnums=0)
    @native.within
    def run(slots_SR, host_ER, x_TD, ids_TK, host_TK):
        own, few.MISS_PROGRAMS = few.MISS_PROGRAMS, programs  # while it is traced
        try:
            for _ in range(layers):
                rows = few.plan(ids_TK, EXPERTS, host_TK)
                given = rows, TOP_K, LAYOUT, ACT
                y_PD, slots_SR = few.ffn(x_TD, slots_SR, *given, host_ER=host_ER)
                x_TD = x_TD + y_PD.sum(axis=0)
            return slots_SR, x_TD
        finally:
            few.MISS_PROGRAMS = own

    def timed(slots: list, host_ER) -> float:
        def call():
            found = run(slots.pop(), host_ER, *choice)
            slots.append(found[0])
            return found

        return 1e3 * common.call_ms(call) / layers

    return timed


def _cuda(report, layers: int, rounds: int) -> None:
    """Our own CUDA kernel beside Triton's: sums, time; needs the C++ kernels."""
    layers_LER = [jax.device_put(_records(seed)) for seed in range(layers)]
    host = _records(0)
    host_ER = jax.device_put(host, host_sharding()) if ON_GPU else jax.device_put(host)
    for tokens in TOKENS:
        given, runs, rows = (*_choice(tokens), layers_LER), {}, {}
        for form in ("1", "cuda"):
            with _form(form):
                runs[form] = _timed_tile(None, layers, given)
                rows[form] = np.asarray(_few_rows(*given[:2], layers_LER[0]))
                runs[form]()  # compiles
        error = np.abs(rows["1"] - rows["cuda"]).max() / rows["1"].std()
        report.add(f"CUDA, {tokens} tokens, distance in deviations", float(error))
        times = common.in_turn(runs, rounds)
        report.add(f"Triton (1) and CUDA, {tokens} tokens, us a layer", times)
    x_TD, ids_TK = _choice(1)
    for absent in (0, TOP_K // 2, TOP_K):
        host_TK = np.where(np.arange(TOP_K) < absent, ids_TK, -1).astype(np.int32)
        cases = {}
        for form in ("1", "cuda"):
            with _form(form):
                run = _bring(64, layers, (x_TD, ids_TK, jax.device_put(host_TK)))
                slots = [jax.device_put(host)]
                run(slots, host_ER)  # compiles
            cases[form] = lambda r=run, s=slots: r(s, host_ER)
        name = f"Triton (1) and CUDA, absent {absent} of {TOP_K}"
        report.add(f"{name}, us a layer", common.in_turn(cases, rounds))
        if ON_GPU:
            report.add(f"{name}, profile", common.profile(cases["cuda"], 4 * layers, 4))


@contextlib.contextmanager
def _form(form: str):
    """Few rows meet experts by Triton (1) or by our own CUDA."""
    os.environ[few.VARIABLE] = form
    try:
        yield
    finally:
        del os.environ[few.VARIABLE]


def _few_rows(x_TD, ids_TK, records_ER):
    run = jax.jit(
        native.within(
            lambda x_TD, ids_TK, records_ER: few.ffn(
                *(x_TD, records_ER, few.plan(ids_TK, EXPERTS), TOP_K, LAYOUT, ACT)
            )[0]
        )
    )
    return run(x_TD, ids_TK, records_ER)


def _look_up(report, layers: int, rounds: int) -> None:
    """Alone over one pool, and with a plan for the next layer over slots of each."""
    each, cases = EXPERTS // 2, {}
    own = tuple(layer for layer in range(layers) for _ in range(each))
    for tokens, is_ahead in itertools.product(TOKENS, (False, True)):
        if is_ahead and tokens * TOP_K > each:
            continue  # they would not fit
        spec = CacheSpec(layers, EXPERTS, TOP_K, own if is_ahead else len(own) * (-1,))
        device = DeviceCache(spec, get_eviction("lru"), tuple(range(layers)), is_ahead)
        ids_TK, scores_TE = _choice(tokens)[1], jnp.zeros((tokens, EXPERTS))

        @jax.jit
        @native.within
        def run(cache, ids_TK, scores_TE, device=device):
            cache, found = cache._replace(step=cache.step + 1), []
            for layer in range(layers):
                ahead, coming = None, layer + 1
                if device.is_cut and coming < layers:
                    ahead = Ahead(coming, device.first_of(coming), ids_TK[0], TOP_K)
                given = device, cache, layer, ids_TK, scores_TE, None, ahead
                cache, *plans = look_up(*given)
                found.append(plans)
            return cache, found

        empty = jax.jit(lambda d=device: d.empty(d.new_slots(1, jnp.float32)))()
        given = empty, ids_TK, scores_TE
        jax.block_until_ready(run(*given))
        name = f"{tokens} tokens{', a plan ahead' if is_ahead else ''}"
        cases[name] = lambda r=run, g=given: (
            1e3 * common.call_ms(lambda: r(*g)) / layers
        )
    report.add("look-up, us a layer", common.in_turn(cases, rounds))


if __name__ == "__main__":
    main()
