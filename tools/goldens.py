"""Writes what runs compute, for a comparison of two commits: tokens, logits, counters.

Engines of the default model with many policies, replay of a recorded trace in computed
time, and a simulated cluster that loads from host memory. Nothing that is compared
depends on how fast the machine is.

    python tools/goldens.py OUT.json        # at each commit
    cmp OUT.json OTHER.json
"""

import json
import sys
from pathlib import Path

import numpy as np

import moe_edge as me
from moe_edge.offload.link import EmulatedLink
from moe_edge.predict.base import get_predictor
from moe_edge.simulate.cluster.offload import OffloadPolicy
from moe_edge.simulate.replay.lookups import equal_slots, policy_of
from moe_edge.simulate.replay.timed import CostModel, replay_time
from tests.support.tiny_cluster import asked, constant_pools, run, tiny_costs

PROMPTS = [
    "Once upon a time there was a little fox",
    "Two",
    "A long way from home the old man " * 6,
]
ENGINES = {
    "layered": {},
    "equal": {"slot_plan": "equal", "eviction": "lfu"},
    "few": {"device_memory": "4%"},
    "lfu previous": {"eviction": "lfu", "predictor": "previous"},
    "infinity": {"eviction": "moe_infinity", "predictor": "moe_infinity"},
    "stale gate": {"predictor": "stale_gate", "prefetch_limit": 4},
    "frequency": {"predictor": "frequency", "horizon": 2},
    "successor": {"eviction": "successor"},
    "smoe": {"eviction": "smoe_score", "predictor": "smoe_partial"},
    "substitute": {"eviction": "smoe_score", "route": "substitute"},
    "drop": {"route": "drop"},
    "prefer": {"route": "prefer"},
    "shadow": {"predictor": "shadow"},
    "on demand": {"eviction": "on_demand"},
    "serial": {"asynchronous": False, "predictor": "previous"},
    "pinned": {"memory": "pinned", "predictor": "stale_gate"},
    "assist": {"assist": "all", "predictor": "smoe_partial"},
    "fused": {"mode": "fused", "slot_plan": "equal"},
}
KEPT = ("decode", "prefill", "decode_layers_in_waves", "prediction", "choices")
KEPT += ("rerouted", "host_computed", "hit_ratio", "bytes_moved")
# A thread carries: what came when depends on the machine.
UNSTEADY = ("pinned",)


def _counted(report: dict) -> dict:
    kept = {name: report[name] for name in KEPT if name in report}
    for phase in ("decode", "prefill"):
        kept.get(phase, {}).pop("wait_s", None)
    sent = report.get("transfers", {})
    for name, value in sent.items():
        if isinstance(value, dict):
            kept[name] = {"count": value["count"], "bytes": value["bytes"]}
        elif name != "wait_s":
            kept[name] = value
    return kept


def engines(model) -> dict:
    """Tokens of one row and of three, logits, and what was counted."""
    found = {}
    for name, given in [("resident", None), *ENGINES.items()]:
        if given is None:
            engine = model.resident()
        else:
            given = {"device_memory": "25%", "mode": "layered"} | given
            engine = model.offload(**given)
        with engine:
            one = engine.generate(PROMPTS[0], 24, ignore_eos=True)
            three = engine.generate(PROMPTS, 16, ignore_eos=True)
            logits = engine.logits(PROMPTS[2][:60])
            row = {"tokens": [[*out.tokens] for out in (one, *three)]}
            row["logits"] = float(np.abs(np.asarray(logits, np.float64)).sum()).hex()
            if given is not None and name not in UNSTEADY:
                row["counted"] = _counted(engine.core.report())
        found[name] = row
        print(name, flush=True)
    return found


def replays(trace) -> dict:
    """Every step's seconds and all counters, on a slow link."""
    costs = CostModel(0.001, 0.002, 1000, EmulatedLink(1e6, 0.0003), step_s=0.0005)
    found = {}
    for eviction in ("lru", "lfu", "belady", "moe_infinity", "successor", "hybrimoe"):
        for predictor in ("none", "previous", "moe_infinity"):
            for slots in (6, 17, 40):
                layer_S = equal_slots(trace, slots)
                given = policy_of(eviction, trace), layer_S, costs
                options = {"horizon": 2, "prefetch_limit": 5}
                timed = replay_time(trace, *given, get_predictor(predictor), **options)
                found[f"{eviction} {predictor} {slots}"] = {
                    "steps": [float(each).hex() for each in timed.step_s],
                    "counters": repr(timed.counters),
                    "moved": repr(timed.moved),
                }
    return found


def simulated() -> dict:
    """A cluster whose servers load what they lack."""
    pools = constant_pools(4, a=[[0], [1]], b=[[1], [0]], c=[[3], [2]])
    requests = asked(
        *(
            (n % 2, 0.7 * n, 1 + n % 3, 1 + n % 4, "abc"[n % 3 if n % 5 else 0])
            for n in range(30)
        )
    )
    found = {}
    for eviction in ("lru", "lfu", "moe_infinity"):
        for predictor in ("none", "previous", "moe_infinity"):
            policy = OffloadPolicy(eviction, predictor)
            costs = tiny_costs((2, 1), 4)
            loop, result = run(requests, None, costs, pools, offload=policy)
            found[f"{eviction} {predictor}"] = {
                "finish": loop.finish_R.tolist(),
                "first": loop.first_R.tolist(),
                "bytes": result.host_bytes_G.tolist(),
                "facts": repr(result.facts),
            }
    return found


def main() -> None:
    model = me.load("default")
    with model.offload("25%", record="trace", mode="layered") as recording:
        recording.generate(PROMPTS[:2], 24, ignore_eos=True)
        trace = recording.trace
    found = {"replays": replays(trace), "engines": engines(model)}
    found["simulated"] = simulated()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
