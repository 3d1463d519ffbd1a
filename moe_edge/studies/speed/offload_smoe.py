"""SMoE complete against lossless offloading: time per token, and what it costs."""

import dataclasses
import statistics

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.studies.cases import Case
from moe_edge.studies.engines import Bench
from moe_edge.studies.smoe.fig14 import is_exact, smoe_steps
from moe_edge.studies.speed.offload_links import LATENCY_S
from moe_edge.studies.speed.runs import PROMPT_TOKENS, SHARE, OffloadSettings
from moe_edge.studies.speed.suite import MS, Rows, make_row
from moe_edge.studies.timed_cases import TimedSettings, run_cases

LINK_RATIO = 2.0
AIM = 0.55
BATCH = 3
SMOE = smoe_steps(0.2)["+BA"]  # as configs/policies/smoe.gin
_EQUAL = {"eviction": "lru", "slot_plan": "equal"}
_PARTIAL = {"predictor": "smoe_partial", "predictor_options": {"top_a": None}}
_ASSIST = {"assist": "two_pointer"}
LOSSLESS = {
    "lru, equal slots": _EQUAL,
    "lfu": {"eviction": "lfu"},
    "lfu, smoe_partial": {"eviction": "lfu"} | _PARTIAL,
    "lru, equal slots, smoe_partial": _EQUAL | _PARTIAL,
    "lfu, assist": {"eviction": "lfu"} | _ASSIST,
    "lru, equal slots, smoe_partial, assist": _EQUAL | _PARTIAL | _ASSIST,
}


def smoe_rows(settings: OffloadSettings) -> Rows:
    """SMoE against our best lossless configuration, with and without CPU assist.

    With assist the lossless ones are equal up to rounding (interfaces.md, gate B),
    without it bit by bit.
    """
    sizes = TimedSettings(
        rounds=settings.repeats,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=settings.smoe_tokens,
        batches=(BATCH,),
        link_factor=LINK_RATIO,
        link_latency_s=LATENCY_S,
        fidelity_rows=settings.fidelity_rows,
    )
    named = {name: OffloadOptions(**options) for name, options in LOSSLESS.items()}
    cases = [
        Case(name, SHARE, BATCH, options, is_exact(options))
        for name, options in ({"smoe": SMOE} | named).items()
    ]
    with Bench(DEFAULT_MODEL) as bench:
        timing = run_cases(bench, cases, sizes)
    times_ms = {
        case.policy: [MS * seconds for seconds in timing[case.key].tpot_s]
        for case in cases
    }
    medians_ms = {name: statistics.median(times) for name, times in times_ms.items()}
    rows = []
    for kind, names in (
        ("lossless", list(LOSSLESS)),
        ("lossless without assist", [n for n in LOSSLESS if "assist" not in n]),
    ):
        best = min(names, key=medians_ms.get)
        rows.append(
            make_row(
                f"default, 25 %, batch {BATCH}, emulated link {LINK_RATIO:g}x, SMoE "
                f"beside {kind}",
                times_ms["smoe"],
                "ms/token",
                peer=times_ms[best],
                peer_name=f"best {kind}: {best}",
                bar=AIM,
                emulated=True,
                peers=medians_ms,
                resident_ms_per_token=MS * statistics.median(timing.resident_s[BATCH]),
                fidelity=dataclasses.asdict(timing["smoe", SHARE, BATCH].fidelity),
                checks=timing.checks(),
                link=timing.ready.link.describe(),
            )
        )
    return rows
