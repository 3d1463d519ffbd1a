"""Suite `serving`: policies, the request loop and the prompt cache, in one process."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.bench.rounds import interleave, round_order, seconds_of
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.core.checks import CapacityError
from moe_edge.engine.base import Engine
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.loadtest.computed import served_at
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    in_whole_experts,
    offered_requests,
)
from moe_edge.profile.step_costs import measure_steps
from moe_edge.schedule.policy import get_scheduler
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver
from moe_edge.serve.options import ServingOptions, make_driver
from moe_edge.simulate.goodput import goodput
from moe_edge.studies.speed.serving import FLOOR_SHARES, ServingSettings
from moe_edge.workload.requests import Lengths

# Prompt and answer of requests that come together, in tokens.
LENGTHS = Lengths(32, 0.5, 48, 0.5)
# Least gains that are asked for; a row's bar is on times, so their inverse.
FIFO_GAIN, ONE_K_GAIN, SAME_FLOOR_GAIN, GOODPUT_GAIN = 1.20, 1.12, 0.97, 1.4
LOOP_BAR, PREFIX_BAR = 1.05, 0.6


def floors_of(own_k: int, count: int) -> list[int]:
    """A floor for each request, all shares alike often, in random order.

    In turn, every batch of a few requests would hold the highest one.
    """
    shares = [FLOOR_SHARES[i % len(FLOOR_SHARES)] for i in range(count)]
    shares = np.random.default_rng(3).permutation(shares).tolist()
    return [max(1, round(own_k * share)) for share in shares]


def options_of(settings: ServingSettings, **options) -> ServingOptions:
    """Of a server that refuses nobody."""
    given = {
        "max_batch": settings.max_batch,
        "max_context": settings.max_context,
        "max_waiting": 10 * max(settings.requests, settings.loop_requests),
    }
    return ServingOptions(**given | options)


def driver_of(engine: Engine, settings: ServingSettings, **options) -> Driver:
    """A driver that refuses nobody, warmed up."""
    driver = make_driver(engine, options_of(settings, **options))
    driver.slots.warm_up()
    return driver


def serve_all(driver: Driver, asked: Sequence[Request]) -> float:
    """Seconds until requests that come at once have ended."""

    def run() -> None:
        for each in asked:
            driver.submit(dataclasses.replace(each))  # asked in each round
        while driver.is_busy:
            stepped = driver.step()
            if stepped is not None and stepped.error is not None:
                raise stepped.error

    return seconds_of(run)


def requests_of(engine: Engine, settings: ServingSettings, floors) -> list[Request]:
    """Requests of random tokens; lengths and tokens are those of every engine."""
    rng = np.random.default_rng(0)
    sizes = LENGTHS.draw(len(floors), rng)
    sizes = np.minimum(sizes, settings.max_context // 2).tolist()
    vocab = engine.config.vocab_size
    return [
        Request(
            prompt=tuple(rng.integers(0, vocab, prompt).tolist()),
            new_tokens=new,
            floor=floor,
        )
        for (prompt, new), floor in zip(sizes, floors, strict=True)
    ]


def policy_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """Requests that come at once: every row at its own floor against batches at one."""
    engines = [load_engine(path, with_tokenizer=False).engine for _, path in models]
    original, refactored = engines
    n, cases = settings.requests, {}

    def case(name: str, engine: Engine, policy: str, is_mixed: bool = True) -> None:
        own = engine.config.moe.top_k
        asked = requests_of(
            engine, settings, floors_of(own, n) if is_mixed else [own] * n
        )
        driver = driver_of(engine, settings, policy=policy)
        cases[name] = lambda: serve_all(driver, asked)

    case("ours", refactored, "continuous")
    case("fifo", original, "fifo")
    case("one_k", original, "continuous_one_k")
    case("ours, original", original, "continuous")
    case("ours_one_k", refactored, "continuous_one_k")
    case("ours, one floor", refactored, "continuous", False)
    case("one_k, one floor", refactored, "continuous_one_k", False)
    found = interleave(cases, settings.repeats)
    what = f"{n} requests at once"

    def row(ours: str, peer: str, name: str, gain: float | None, more: str = ""):
        bar = None if gain is None else 1 / gain
        given = {"peer": found[peer], "peer_name": name, "bar": bar}
        # A case is named by its peer too: there are several of the same requests.
        case = f"{what}{more} beside {name}"
        return make_row(case, found[ours], "s", **given)

    # What the loop gives, what sub-experts give, and both together.
    on_original, one_k = ", continuous, original", "continuous_one_k"
    same_floor = ", all floors the model's K, continuous"
    return [
        row("ours", "fifo", "fifo, original", FIFO_GAIN, ", continuous"),
        row("ours", "one_k", f"{one_k}, original", ONE_K_GAIN, ", continuous"),
        row("ours, original", "fifo", "fifo", None, on_original),
        row("ours, original", "one_k", one_k, None, on_original),
        row("ours", "ours, original", "the original", None, ", continuous"),
        row("ours", "ours_one_k", f"{one_k}, refactored", None, ", continuous"),
        row("ours, one floor", "one_k, one floor", one_k, SAME_FLOOR_GAIN, same_floor),
    ]


def goodput_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """Computed: the highest rate at which enough requests are in time.

    Floors are all K from an eighth of the refactored model's on; the original runs the
    next whole number of experts. Costs are measured in every round: one table and
    another differ by a fifth from minute to minute.
    """
    engines = {n: load_engine(path, with_tokenizer=False).engine for n, path in models}
    (original, _), (refactored, _) = models
    own = engines[refactored].config.moe.top_k
    runs: Mapping[str, list[float]] = {"ours": [], "ours, original": [], "peer": []}
    for seed in range(settings.repeats):
        costs = _costs(engines, round_order(list(engines), seed), settings)
        offered = _offered(settings, own, seed)
        for run, model, policy in (
            ("ours", refactored, "continuous"),
            ("ours, original", original, "continuous"),
            ("peer", original, "fifo"),
        ):
            requests = in_whole_experts(offered, own // costs[model][-1])
            runs[run].append(_goodput(*costs[model], policy, settings, requests))
    # The bar is on a ratio that should be small: so of the gaps between requests.
    gaps_ms = {name: [MS / rate for rate in runs[name] if rate] for name in runs}
    if not all(gaps_ms.values()):
        raise CapacityError(f"no rate is served in time: goodput is {runs}")
    if not all(map(all, gaps_ms.values())):
        raise CapacityError(
            f"{settings.goodput_requests} requests are in time at any rate: goodput is "
            f"{runs}; raise goodput_requests"
        )

    def row(ours: str, more: str = "", bar: float | None = None, **details):
        return make_row(
            f"goodput, continuous{more}, computed: gap between requests",
            gaps_ms[ours],
            "ms",
            peer=gaps_ms["peer"],
            peer_name="fifo, original",
            bar=bar,
            **details,
        )

    return [
        row("ours", bar=1 / GOODPUT_GAIN, requests_per_s=runs),
        row("ours, original", ", original"),
    ]


def _costs(
    engines: Mapping[str, Engine], order: Sequence[str], settings: ServingSettings
) -> Mapping[str, tuple[StepCosts, int]]:
    """Of each engine's steps, and its own K."""
    sizes = {"max_batch": settings.max_batch, "max_context": settings.max_context}
    found = {}
    for name in order:
        measured = measure_steps(engines[name], **sizes, repeats=settings.repeats)
        found[name] = measured.costs, engines[name].config.moe.top_k
    return found


def _offered(settings: ServingSettings, own_k: int, seed: int) -> list[Offered]:
    """Requests at one a second."""
    load = LoadOptions(
        poisson=1.0,
        duration_s=float(settings.goodput_requests),
        prompt_tokens=round(LENGTHS.input_mean),
        output_tokens=round(LENGTHS.output_mean),
        floors=",".join(f"{k}:1" for k in range(max(own_k // 8, 1), own_k + 1)),
        seed=seed,
    )
    return offered_requests(load, settings.max_context)


def _goodput(
    costs: StepCosts,
    own_k: int,
    policy: str,
    settings: ServingSettings,
    requests: Sequence[Offered],
) -> float:
    given = {"max_batch": settings.max_batch, "own_k": own_k, "costs": costs}
    chosen = get_scheduler(policy, **given)
    sizes = SlotSizes(**options_of(settings).sizes(settings.max_context))

    return goodput(lambda rate: served_at(rate, requests, chosen, costs, sizes))


def loop_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """The loop over row slots, against `generate` in batches of the same size."""
    engine = load_engine(models[-1][1], with_tokenizer=False).engine
    own, batch = engine.config.moe.top_k, settings.max_batch
    asked = same_requests(engine, settings, own)
    driver = driver_of(engine, settings, prompt_cache="0")

    def bare() -> None:
        for first in range(0, len(asked), batch):
            prompts = [each.prompt for each in asked[first : first + batch]]
            generate(engine, prompts, settings.new_tokens)

    found = interleave(
        {"ours": lambda: serve_all(driver, asked), "bare": lambda: seconds_of(bare)},
        settings.repeats,
    )
    n, P, N = settings.loop_requests, settings.prompt_tokens, settings.new_tokens
    return [
        make_row(
            f"loop, {n} requests of {P} + {N} tokens",
            found["ours"],
            "s",
            peer=found["bare"],
            peer_name=f"generate by {batch}",
            bar=LOOP_BAR,
        )
    ]


def same_requests(
    engine: Engine, settings: ServingSettings, floor: int
) -> list[Request]:
    """Requests of one length and floor, of random tokens."""
    shape = settings.loop_requests, settings.prompt_tokens
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, engine.config.vocab_size, shape).tolist()
    given = {"new_tokens": settings.new_tokens, "floor": floor}
    return [Request(prompt=tuple(prompt), **given) for prompt in prompts]


def prefix_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """Time to the first token of a long prompt that ran before."""
    engine = load_engine(models[-1][1], with_tokenizer=False).engine
    driver = driver_of(engine, settings)
    rng, own = np.random.default_rng(2), engine.config.moe.top_k
    first, again = [], []
    for number in range(settings.repeats + 1):
        prefix = rng.integers(0, engine.config.vocab_size, settings.prefix_tokens)
        for seen in (first, again):
            prompt = tuple([*prefix.tolist(), 1 + len(again)])
            asked = Request(prompt=prompt, new_tokens=2, floor=own)
            driver.submit(asked)
            while driver.is_busy:
                driver.step()
            if number:  # the first one warms pages up
                seen.append(MS * asked.ttft_s)
    return [
        make_row(
            f"prefix of {settings.prefix_tokens} tokens again, TTFT",
            again,
            "ms",
            peer=first,
            peer_name="the first time",
            bar=PREFIX_BAR,
        )
    ]
