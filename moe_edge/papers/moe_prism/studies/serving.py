"""MoE-Prism, figures 7 and 12: requests with floors, served by models and policies.

Every round offers the same requests to all systems, in turn. The original's floors are
whole experts: the next number of them that computes as many sub-experts. The same
requests are also served in computed time, over costs measured right before.
"""

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.bench.rounds import ON_TIME, round_order
from moe_edge.bench.speed import describe_models
from moe_edge.bench.started import start_number
from moe_edge.bench.study import weights_of
from moe_edge.engine.base import Engine
from moe_edge.engine.load import load_engine
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.loadtest.computed import served_at
from moe_edge.loadtest.in_process import Clock, serve
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    block_tokens,
    in_whole_experts,
    offered_requests,
)
from moe_edge.loadtest.prompts import Prompts, text_ids
from moe_edge.metrics.frames import Rows
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.serving_entry import (
    AT_ONCE,
    Runs,
    below_floor,
    label_of,
    tell_runs,
)
from moe_edge.papers.moe_prism.studies.serving_studies import (
    COMPUTED,
    MEASURED,
    OURS,
    PRISM,
    SAME,
    SYSTEMS,
    ServingStudySettings,
    System,
)
from moe_edge.profile.step_costs import measure_steps
from moe_edge.schedule.figures import summarise
from moe_edge.schedule.policy import get_scheduler
from moe_edge.serve.driver import Driver
from moe_edge.serve.options import ServingOptions, make_driver

BATCHES = 24  # of requests that come at once: what a system sustains


class Servers:
    """Both models, what their steps cost, and a driver for every system."""

    def __init__(self, settings: ServingStudySettings, folder: Path):
        self.settings, self._folder = settings, folder
        self.paths = dict(list(settings.checkpoints().items())[:2])
        self._engines: dict[str, Engine] = {}
        self._costs: dict[str, StepCosts] = {}
        for name, path in self.paths.items():
            loaded = load_engine(path)
            self._engines[name] = loaded.engine
        self.time_steps()
        for name, costs in self._costs.items():
            self._file(name).write_text(json.dumps({"step_costs": costs.to_json()}))
        own = {name: each.config.moe.top_k for name, each in self._engines.items()}
        self._own, self._subs = own, max(own.values()) // own[ORIGINAL]
        ids = text_ids(loaded.tokenizer, settings.data_dir)
        blocks = block_tokens(self._load(1.0, 1.0, 0))
        self._prompts = Prompts(ids, blocks, seed=start_number() or 0)
        self._drivers: dict[str, Driver] = {}
        for name in settings.systems:
            system = SYSTEMS[name]
            self._drivers[name] = make_driver(
                self._engines[system.model], self._options(system), Clock()
            )
            self._drivers[name].slots.warm_up()

    def time_steps(self) -> None:
        """Measures what steps cost now; policies keep the costs that they began with.

        The speed of a machine drifts by more than computed time may be off.
        """
        sizes = {
            "max_batch": self.settings.max_batch,
            "max_context": self.settings.max_context,
            "repeats": 3,
        }
        for name, engine in self._engines.items():
            self._costs[name] = measure_steps(engine, **sizes).costs

    def _file(self, model: str) -> Path:
        return self._folder / f"{model}.json"

    def _options(self, system: System) -> ServingOptions:
        settings = self.settings
        return ServingOptions(
            policy=system.policy,
            max_batch=settings.max_batch,
            max_wait_s=settings.max_wait_s,
            max_waiting=1_000_000,  # nobody is refused: how late is what is measured
            max_context=settings.max_context,
            prompt_cache="0",
            costs=str(self._file(system.model)),
        )

    def num_compiled(self) -> int:
        """Programs of all drivers so far."""
        return sum(driver.slots.num_compiled() for driver in self._drivers.values())

    def _load(self, rate: float, seconds: float, seed: int) -> LoadOptions:
        settings = self.settings
        return LoadOptions(
            poisson=rate,
            duration_s=seconds,
            prompt_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            floors=",".join(f"{floor}:1" for floor in settings.floors),
            data_dir=settings.data_dir,
            seed=seed,
        )

    def offered(self, rate: float, seconds: float, seed: int) -> list[Offered]:
        """Requests whose floors are sub-experts; at an infinite rate some batches."""
        if math.isfinite(rate):
            load = self._load(rate, seconds, seed)
            return offered_requests(load, self.settings.max_context)
        count = BATCHES * self.settings.max_batch
        some = self.offered(1.0, 2.0 * count, seed)[:count]
        return [dataclasses.replace(each, arrival_s=0.0) for each in some]

    def _floors(self, system: System, offered: Sequence[Offered]) -> list[Offered]:
        """The same requests, with floors as the system's model counts them."""
        if system.model != ORIGINAL:
            return list(offered)
        return in_whole_experts(offered, self._subs)

    def measured(self, name: str, offered: Sequence[Offered]) -> dict[str, Any]:
        """Figures of a run of the engine itself."""
        system, driver = SYSTEMS[name], self._drivers[name]
        prompts = [self._prompts(each) for each in offered]
        requests = self._floors(system, offered)
        own = self._own[system.model]
        served, _, failure = serve(driver, driver.clock, requests, prompts, own)
        if failure is not None:
            raise RuntimeError(failure)
        return self._figures(system, served)

    def computed(self, name: str, offered: Sequence[Offered]) -> dict[str, Any]:
        """Figures of the same in computed time."""
        system, settings = SYSTEMS[name], self.settings
        own, costs = self._own[system.model], self._costs[system.model]
        policy = get_scheduler(
            system.policy,
            max_batch=settings.max_batch,
            max_wait_s=settings.max_wait_s,
            own_k=own,
            costs=costs,
        )
        requests, sizes = (
            self._floors(system, offered),
            self._drivers[name].slots.shapes,
        )
        return self._figures(system, served_at(1.0, requests, policy, costs, sizes))

    def _figures(self, system: System, served) -> dict[str, Any]:
        settings = self.settings
        figures = summarise(
            served,
            slo_ttft_s=settings.slo_ttft_ms / 1e3,
            slo_tpot_s=settings.slo_tpot_ms / 1e3,
        )
        if system.model == ORIGINAL and figures["mean_k"] is not None:
            figures["mean_k"] *= self._subs  # in sub-experts, as of the others
        return figures

    def sustained(self) -> float:
        """Requests a second of the first system with never an empty queue."""
        offered = self.offered(math.inf, 0.0, seed=10_000)
        return self.measured(self.settings.systems[0], offered)["throughput_req_s"]


def seed_of(settings: ServingStudySettings, number: int, load: float) -> int:
    """Of the requests of a round at a load; a start has requests of its own."""
    number += settings.rounds * (start_number() or 0)
    return 100 * number + (0 if load == AT_ONCE else round(10 * load))


def measure(settings: ServingStudySettings, rows: Rows) -> None:
    """Serves the same requests by every system: measured and computed."""
    settings = making.make_models(settings)
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(settings, Path(folder))
        servers.sustained()  # first use of pages
        rate = servers.sustained()
        print(f"{settings.systems[0]} sustains {rate:.2f} requests/s", flush=True)
        before, figures = servers.num_compiled(), Runs()
        for number in range(settings.rounds):
            for load in (*settings.loads, AT_ONCE):
                seed = seed_of(settings, number, load)
                offered = servers.offered(load * rate, settings.duration_s, seed)
                longer = servers.offered(load * rate, settings.computed_s, seed)
                servers.time_steps()
                for name in round_order(list(settings.systems), number):
                    found = servers.measured(name, offered)
                    figures.add(MEASURED, name, load, found)
                    print(
                        f"round {number}, {label_of(load)}, {name}: "
                        f"{found['throughput_req_s']:.2f} requests/s, TTFT "
                        f"{found['ttft_ms']['mean']:.0f} ms",
                        flush=True,
                    )
                    same = servers.computed(name, offered)
                    figures.add(SAME, name, load, same)
                    figures.add(COMPUTED, name, load, servers.computed(name, longer))
        late = servers.num_compiled() - before
        model = describe_models([(n, Path(p)) for n, p in servers.paths.items()])
        model["weights"] = weights_of(settings.checkpoint)
    tell_runs(rows, settings, figures, rate)
    models.tell(rows, settings, model, {"sustained_req_s": rate})
    rows.checks[ON_TIME] = late == 0
    rows.checks["no token below its floor"] = below_floor(settings, figures) == 0
    rows.about["baselines"] = [s for s in settings.systems if s not in (OURS, PRISM)]
    rows.files["runs.json"] = figures.to_json()
