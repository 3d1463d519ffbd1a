"""SMoE complete against lossless offloading: time per token, and what it costs.

Every configuration decodes the same forced tokens, so that times compare equal work
and fidelity comes from the same kind of run.
"""

import dataclasses
import functools
import statistics

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.stepwise import Forced, ForcedRun, score_forced
from moe_edge.offload.link import Link
from moe_edge.studies.quickstart.texts import held_out_texts
from moe_edge.studies.rounds import interleave
from moe_edge.studies.speed.offload_links import link_for
from moe_edge.studies.speed.offload_runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    layer_share,
    load_offloaded,
    start_cold,
)
from moe_edge.studies.speed.suite import MS, Rows, make_row

LINK_RATIO = 2.0
AIM = 0.55
DOMAINS = ("books", "code", "arithmetic")
# As configs/policies/smoe.gin.
SMOE = {
    "eviction": "smoe_score",
    "route": "substitute",
    "route_options": {"a": 0.2},
    "predictor": "smoe_partial",
    "predictor_options": {"top_a": 0.2},
    "assist": "two_pointer",
}
_EQUAL = {"eviction": "lru", "slot_plan": "equal"}
_PARTIAL = {"predictor": "smoe_partial", "predictor_options": {"top_a": None}}
LOSSLESS = {
    "lru, equal slots": _EQUAL,
    "lfu": {"eviction": "lfu"},
    "lfu, smoe_partial": {"eviction": "lfu"} | _PARTIAL,
    "lru, equal slots, smoe_partial": _EQUAL | _PARTIAL,
    "lfu, assist": {"eviction": "lfu", "assist": "two_pointer"},
    "lru, equal slots, smoe_partial, assist": _EQUAL
    | _PARTIAL
    | {"assist": "two_pointer"},
}


def smoe_rows(settings: OffloadSettings) -> Rows:
    """SMoE against our best lossless configuration, with and without CPU assist.

    With assist the lossless ones are equal up to rounding (interfaces.md, gate B),
    without it bit by bit.
    """
    loaded = load_engine(DEFAULT_MODEL)
    resident, B = loaded.engine, len(DOMAINS)
    timed = forced_rows(loaded.tokenizer, PROMPT_TOKENS + settings.smoe_tokens)
    options = {"smoe": SMOE, **LOSSLESS}
    engines = {
        name: load_offloaded(DEFAULT_MODEL, device_memory=SHARE, batch=B, **given)
        for name, given in options.items()
    }
    prompts = [row.ids[:PROMPT_TOKENS] for row in timed]
    share = layer_share(resident, prompts, settings.host_steps)
    # One capacity for all calls: another one would compile everything again.
    capacity = PROMPT_TOKENS + max(settings.smoe_tokens, settings.fidelity_tokens)
    score = functools.partial(score_forced, capacity=capacity)
    score(resident, timed)  # compiles
    step_s = statistics.median(
        tpot_s(score(resident, timed)) for _ in range(settings.repeats)
    )
    block_bytes = engines["smoe"].manager.queue.store.block_bytes
    layer_s = share * step_s / resident.config.num_layers
    link = link_for(LINK_RATIO * layer_s, block_bytes)
    cases = {
        name: functools.partial(_forced_run, score, engine, timed, link)
        for name, engine in engines.items()
    }
    runs = interleave(cases, settings.repeats)
    times_ms = {name: [MS * tpot_s(run) for run in runs[name]] for name in engines}
    longer = forced_rows(loaded.tokenizer, PROMPT_TOKENS + settings.fidelity_tokens)
    lossy = _forced_run(score, engines["smoe"], longer, link)
    fidelity = dataclasses.asdict(compare(lossy, score(resident, longer)))
    rows = []
    for kind, names in (
        ("lossless", list(LOSSLESS)),
        ("lossless without assist", [n for n in LOSSLESS if "assist" not in n]),
    ):
        best = min(names, key=lambda name: statistics.median(times_ms[name]))
        rows.append(
            make_row(
                f"default, 25 %, batch {B}, emulated link {LINK_RATIO:g}x, SMoE "
                f"beside {kind}",
                times_ms["smoe"],
                "ms/token",
                peer=times_ms[best],
                peer_name=f"best {kind}: {best}",
                bar=AIM,
                emulated=True,
                peers={n: statistics.median(t) for n, t in times_ms.items()},
                resident_ms_per_token=MS * step_s,
                fidelity=fidelity,
                link=link.describe(),
            )
        )
    for engine in engines.values():
        engine.close()
    return rows


def forced_rows(tokenizer, tokens: int) -> list[Forced]:
    """`tokens` of each domain's held-out text, scored after PROMPT_TOKENS."""
    texts = held_out_texts(8 * tokens, seed=0)
    rows = []
    for domain in DOMAINS:
        ids = tokenizer.encode(texts[domain][0])[:tokens]
        rows.append(Forced(ids, PROMPT_TOKENS))
    return rows


def tpot_s(run: ForcedRun) -> float:
    """Seconds a decode step (of the whole batch) took."""
    return run.decode_s / run.steps


def _forced_run(score, engine, rows, link) -> ForcedRun:
    """A run that begins with empty slots; all its transfers go over the link."""
    start_cold(engine.manager, link)
    run = score(engine, rows)
    engine.manager.queue.link = Link()
    return run
