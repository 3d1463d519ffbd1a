"""Plans every budget of a link from one calibration, and runs each plan's best."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from moe_edge.bench.engines import describe_model
from moe_edge.core.files import write_json
from moe_edge.core.json_reader import read_json
from moe_edge.core.progress import say
from moe_edge.engine.load import load_engine
from moe_edge.metrics.frames import Rows
from moe_edge.planner.calibrate import Calibrated
from moe_edge.planner.candidates import space_of
from moe_edge.planner.estimate import Subject
from moe_edge.planner.live import Live
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import calibrated, protocol_of
from moe_edge.planner.quality import Quality
from moe_edge.planner.search import search
from moe_edge.planner.verify import verify
from moe_edge.studies.planning.errors import ErrorSettings

SHOWN = {"eviction", "predictor", "assist", "slot_plan"}  # what a plan may change


def measure(settings: ErrorSettings, rows: Rows) -> None:
    """All links, each kept when it is done."""
    facts = dataclasses.asdict(settings)
    for rate in settings.links:
        for frame, found in _kept(settings, rate).items():
            for row in found:
                rows(frame, **row)
    loaded = load_engine(settings.checkpoint, with_tokenizer=False)
    rows.about |= {
        "model": describe_model(loaded.name, loaded.engine.weights, loaded.dtype),
        "workload": {n: v for n, v in facts.items() if n != "work_dir"},
        "seeds": [settings.seed, settings.prompts_seed],
    }


def _kept(settings: ErrorSettings, rate: float) -> dict[str, list[dict[str, Any]]]:
    """Rows by frame of a link, measured unless they are there."""
    own = dataclasses.asdict(settings) | {"work_dir": ""}
    own["links"] = rate, rate == settings.links[0]
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:12]
    path = Path(settings.work_dir) / f"{rate:g}-{digest}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _link(settings, rate))
    return read_json(path)


def _link(settings: ErrorSettings, rate: float) -> dict[str, list[dict[str, Any]]]:
    budgets = settings.budgets
    asked = PlanOptions(
        checkpoint=settings.checkpoint,
        device_memory=budgets[len(budgets) // 2],
        link_bytes_per_s=rate,
        link_latency_s=settings.link_latency_s,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    base, fixed = asked.base(None)
    live = Live(settings.checkpoint, None, asked.batch, asked.tokens)
    protocol = protocol_of(asked, live, settings.seed, [])
    space = space_of(base, fixed, live.config)
    done, _ = calibrated(asked, live, space, protocol, [])
    link = f"{rate / 1e6:g} MB/s"
    found: dict[str, list[dict[str, Any]]] = {"costs": _costs(link, done)}
    found |= {"runs": [], "plans": []}
    kinds = [(budget, fixed) for budget in budgets]
    if rate == settings.links[0]:
        kinds.append((asked.device_memory, fixed | {"assist"}))  # none, as in the base
    for budget, kept in kinds:
        options = dataclasses.replace(base, device_memory=budget)
        space = space_of(options, kept, live.config)
        space = space.without(done.left_out, done.recorded.predicted)
        subjects = {(None, None): Subject(live, done.costs, done.recorded)}
        searched = search(space, subjects, [Quality()], asked)
        other = protocol_of(asked, live, settings.prompts_seed, [])
        wanted = searched.judged[: 1 + settings.next_ones]
        *ran, again = verify([*wanted, wanted[0]], subjects, other)
        what = budget if kept == fixed else f"{budget}, no assist"
        found["runs"] += [
            {"link": link, "budget": what, "rank": rank} | _run(one)
            for rank, one in enumerate(ran, 1)
        ]
        measured = [one["measured"]["tpot_s"] for one in ran]
        found["plans"].append(
            {
                "link": link,
                "budget": what,
                "behind": measured[0] / min(measured) - 1,
                "again": again["measured"]["tpot_s"] / measured[0] - 1,
                "search_s": searched.seconds,
                "replays": searched.replays,
            }
        )
        for row in found["runs"][-len(ran) :]:
            say(str(row))
    return found


def _run(one: dict[str, Any]) -> dict[str, Any]:
    changed = {n: v for n, v in one["offload"].items() if n in SHOWN}
    low, middle, high = (1e3 * s for s in one["predicted"]["tpot_s"])
    return {
        "plan": ", ".join(f"{n} {v}" for n, v in changed.items()) or "defaults",
        "low_ms": low,
        "predicted_ms": middle,
        "high_ms": high,
        "measured_ms": 1e3 * one["measured"]["tpot_s"],
        "own": one["own_lookups_error"],
        "other": one["error"]["tpot_s"],
        "hits": one["error"]["hit_ratio"],
        "first": float(one["error"]["ttft_s"]),
    }


def _costs(link: str, done: Calibrated) -> list[dict[str, Any]]:
    """What a predictor's step takes with all experts here, and what a block costs the
    host beyond replay over the machine's own link and over this one."""
    costs = done.costs
    return [
        {
            "link": link,
            "predictor": name,
            "here_ms": 1e3 * here_s,
            "own_us": 1e6 * costs.miss_host_s[name][0][1],
            "link_us": 1e6 * costs.miss_host_s[name][-1][1],
        }
        for name, here_s in costs.per_predictor_s.items()
    ]
