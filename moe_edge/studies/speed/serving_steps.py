"""Suite `serving`: what a decision, a step of mixed K and sampling take."""

import functools
import time
from pathlib import Path

import jax
import numpy as np

from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.engine.load import load_engine
from moe_edge.engine.slot_programs import SlotPrograms
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.hardware.step_costs import CostTable, StepCosts
from moe_edge.model.row_sampling import make_rules
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import SCHEDULERS, get_scheduler
from moe_edge.schedule.request import Request
from moe_edge.studies.speed.serving import FLOOR_SHARES, ServingSettings

WAITING, LEVELS = 1000, 32
PICKS = 500  # a round
STEPS = 20  # of a setting, a round
STEP_ROUNDS = 8  # a repeat: a round of steps lasts no longer than a disturbance
PICK_MS, SAMPLING_MS, MIXED_BAR = 1.0, 1.0, 0.88
RULES = (  # of rows that are sampled together
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_k=40),
    Sampling(temperature=1.0, top_p=0.9),
)


def pick_rows(settings: ServingSettings, _work_dir: Path, _models: Models) -> Rows:
    """p99 of each policy's `pick` with many waiting requests of many floors."""
    table = CostTable((1, settings.max_batch), (1, LEVELS), [[1e-3, 2e-3]] * 2)
    given = {
        "max_batch": settings.max_batch,
        "max_wait_s": 1e9,  # nobody is in a hurry: all queues are compared
        "own_k": LEVELS,
        "costs": StepCosts(table, table, "any"),
    }
    rows = []
    for name in SCHEDULERS:
        policy = get_scheduler(name, **given)
        p99s = [_pick_p99_s(policy, seed) for seed in range(settings.repeats)]
        case = f"pick, {name}, {WAITING} waiting, {LEVELS} floors, p99"
        ours = [MS * seconds for seconds in p99s]
        rows.append(make_row(case, ours, "ms", limit=PICK_MS))
    return rows


def _pick_p99_s(policy, seed: int) -> float:
    rng, loop = np.random.default_rng(seed), RequestLoop(policy)
    for number in range(WAITING):
        floor, prompt, new = rng.integers(1, (LEVELS + 1, 512, 256)).tolist()
        sizes = {"floor": floor, "prompt_tokens": prompt, "new_tokens": new}
        job = Request(number, arrival_s=0.0, **sizes)
        loop.admit(job, loop.arrive(job, 0.0), 0.0)
    pick = functools.partial(policy.pick, loop.lanes[0], 1.0)
    return float(np.percentile([seconds_of(pick) for _ in range(PICKS)], 99))


def step_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """A decode step of rows of all floors, against one with all at the model's K."""
    engine = load_engine(models[-1][1], with_tokenizer=False).engine
    own, rows = engine.config.moe.top_k, settings.max_batch
    slots = RowSlots(engine, max_rows=rows, max_context=settings.max_context)
    mixed = [round(own * FLOOR_SHARES[i % len(FLOOR_SHARES)]) for i in range(rows)]
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.config.vocab_size, (rows, settings.prompt_tokens))
    room = settings.max_context - settings.prompt_tokens

    def step_s(ks) -> float:
        """Median of some steps, all of them at the same positions for every K."""
        slots.admit(
            [
                SlotRow(id=i, prompt=tuple(prompt), max_new_tokens=room, k=k)
                for i, (prompt, k) in enumerate(zip(prompts.tolist(), ks, strict=True))
            ]
        )
        while slots.has_prompts:
            slots.prefill()
        seconds = [seconds_of(slots.decode) for _ in range(STEPS + 1)]
        for i in range(rows):
            slots.release(i)
        return MS * float(np.median(seconds[1:]))

    cases = {"mixed": lambda: step_s(mixed), "own": lambda: step_s([own] * rows)}
    found = interleave(cases, STEP_ROUNDS * settings.repeats)
    return [
        make_row(
            f"step of {rows} rows, K {', '.join(map(str, sorted(set(mixed))))}",
            found["mixed"],
            "ms",
            peer=found["own"],
            peer_name=f"all at K {own}",
            bar=MIXED_BAR,
        )
    ]


def sampling_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """Drawing the next tokens of rows that have different rules."""
    engine = load_engine(models[0][1], with_tokenizer=False).engine
    programs = SlotPrograms(engine)
    rows, vocab = settings.max_batch, engine.config.vocab_size
    rng = np.random.default_rng(0)
    logits_BV = jax.device_put(rng.standard_normal((rows, vocab), np.float32))
    pairs = [(RULES[i % len(RULES)], i) for i in range(rows)]
    rules = engine.put(make_rules(pairs))

    def draw_ms() -> float:
        seconds = []
        for _ in range(STEPS):
            started_s = time.perf_counter()
            np.asarray(programs.draw(logits_BV, rules)[0])
            seconds.append(time.perf_counter() - started_s)
        return MS * float(np.median(seconds))

    ours = interleave({"ours": draw_ms}, settings.repeats)["ours"]
    case = f"sampling, {rows} rows x {vocab}, {len(RULES)} rules"
    return [make_row(case, ours, "ms", limit=SAMPLING_MS)]
