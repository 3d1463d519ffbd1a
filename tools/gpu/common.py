"""What the parts share: flags, a report that is written as it grows, the model.

The model has the shape of OLMoE-1B-7B with random weights; its routers repeat a
recorded trace, so that caches meet what they would meet (`studies/speed/traced_cases`).
On a CPU it is a smaller one, to try the parts.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moe_edge.convert.families import config_from_hf
from moe_edge.core.files import write_text
from moe_edge.engine.base import Engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights, load_weights
from moe_edge.offload.store import HostStore
from moe_edge.studies.speed import traced_cases
from moe_edge.studies.speed.traced_model import TracedReader, trace_choices
from moe_edge.workload.trace_reader import read_trace

MS = 1e3


class Report:
    """Results by name, in `OUT_DIR/PART.json` after every one: a part may be cut off.

    Args:
      part: its name.
      out_dir: an existing folder.
    """

    def __init__(self, part: str, out_dir: str):
        self._path, self._begun_s = Path(out_dir) / f"{part}.json", time.monotonic()
        device = jax.devices()[0].device_kind
        self.results: dict[str, Any] = {"device": device, "jax": jax.__version__}
        self.add("layers", None)

    def say(self, *what) -> None:
        print(f"{time.monotonic() - self._begun_s:6.1f} s ", *what, flush=True)

    def add(self, name: str, value) -> None:
        """Keeps, prints and writes one result."""
        self.results[name] = value
        write_text(self._path, json.dumps(self.results, indent=1, default=float))
        if value is not None:
            self.say(name, value)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What fails inside becomes a result; the part goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(f"{name}: failed", f"{type(error).__name__} {str(error)[:500]}")


@dataclasses.dataclass(frozen=True)
class Model:
    """The traced model; its weights exist once, whatever the engines.

    Attributes:
      reader: of its checkpoint, which is no file.
      dense: all weights but the experts.
      steps: tokens that each stand for a step of the trace.
    """

    reader: TracedReader
    dense: Weights
    steps: int

    @classmethod
    def load(cls, trace: str, layers: int) -> "Model":
        hf_config = next(iter(traced_cases.models(("olmoe_7b",)).values()))
        fewer = {"num_hidden_layers": min(layers, hf_config["num_hidden_layers"])}
        config = config_from_hf(hf_config | fewer)
        recorded = read_trace(trace, num_experts=traced_cases.TRACE_EXPERTS)
        chosen_SLK = trace_choices(recorded, config)
        reader = TracedReader(config, chosen_SLK, ml_dtypes.bfloat16)
        dense = load_weights(reader, with_experts=False)
        return cls(reader, dense, len(chosen_SLK))

    @functools.cached_property
    def whole(self) -> Weights:
        """Weights with the experts on the device."""
        return traced_cases.with_experts(self.dense, self.reader)

    @functools.cached_property
    def hosts(self) -> list[jax.Array | None]:
        """Records of each layer in pinned memory, for mode fused."""
        return traced_cases.pinned_layers(self.reader)

    @functools.cached_property
    def store(self) -> HostStore:
        """Of records one by one in pinned memory, for mode layered."""
        on_cpu = jax.default_backend() == "cpu"
        return HostStore(self.reader, "host" if on_cpu else "pinned")

    @functools.cached_property
    def plain_store(self) -> HostStore:
        """Of mode fused, which asks it for shapes."""
        return HostStore(self.reader, "host")

    def resident(self, **options) -> ResidentEngine:
        return ResidentEngine(self.whole, **options)

    def offloaded(self, way: str, budget: str, programs=None) -> Engine:
        """An engine of one of `traced_cases.WAYS`; layered ones share `programs`."""
        fused = traced_cases.WAYS[way]["mode"] == "fused"
        store = self.plain_store if fused else self.store
        options = OffloadOptions(
            device_memory=budget, memory=store.memory, **traced_cases.WAYS[way]
        )
        more = {"hosts": self.hosts} if fused else {"programs": programs}
        return assemble(options, self.dense, store, **more)

    def tokens(self, batch: int, step: int) -> jax.Array:
        rows_B = traced_cases.APART * np.arange(batch, dtype=np.int32)
        return jax.device_put((rows_B + np.int32(step)) % np.int32(self.steps))

    def logits(self, engine: Engine, batch: int, count: int = 6) -> list[np.ndarray]:
        """Float32 `[B, V]` of each of the first `count` steps."""
        session, active_B = engine.new_session(batch, 64), everyone(batch)
        return [
            np.asarray(engine.decode(session, self.tokens(batch, step), active_B))
            for step in range(count)
        ]

    def step_ms(self, engine: Engine, batch: int) -> float:
        """Mean milliseconds of a step; each waits for its logits."""
        return traced_cases.decode_ms(engine, batch, self.steps)


def compare_steps(
    budget: str,
    ways: Mapping[str, Mapping[str, Any]],
    report: Report,
    model: Model,
    rounds: int,
    judge: tuple[str, Callable[[list, list], Any]],
    told: tuple[str, Callable[[Engine], Any]],
) -> None:
    """Steps of mode fused in several ways that take turns, beside the resident engine.

    Args:
      ways: name -> `OffloadOptions` beside the budget.
      judge: of logits and the resident ones: how it is named, and what it says.
      told: of an engine, when all is done: likewise.
    """
    engines, want = {}, model.logits(model.resident(), 1)
    for name, more in ways.items():
        given = {"mode": "fused", "zero_copy": jax.default_backend() == "gpu"}
        options = OffloadOptions(device_memory=budget, **given | dict(more))
        given = options, model.dense, model.plain_store
        engines[name] = assemble(*given, hosts=model.hosts)
        found = judge[1](model.logits(engines[name], 1), want)
        report.add(f"{budget} {name}, {judge[0]}", found)
    cases = {
        name: lambda e=engine: model.step_ms(e, 1) for name, engine in engines.items()
    }
    report.add(f"{budget}, ms a step", in_turn(cases, rounds))
    for name, engine in engines.items():
        report.add(f"{budget} {name}, {told[0]}", told[1](engine))
        engine.close()


def everyone(batch: int) -> jax.Array:
    return jax.device_put(np.ones(batch, bool))


def flags(doc: str, layers: int = 16) -> argparse.ArgumentParser:
    """The flags of every part."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--trace", required=True, help="trace_qwen3_30b_a3b.csv.gz")
    parser.add_argument("--out_dir", required=True, help="folder of PART.json")
    parser.add_argument("--layers", type=int, default=layers, help="of the model")
    parser.add_argument("--rounds", type=int, default=4, help="timings of each case")
    return parser


def begin(part: str, given: argparse.Namespace) -> tuple[Report, Model]:
    report = Report(part, given.out_dir)
    model = Model.load(given.trace, given.layers)
    report.add("layers", model.reader.config.num_layers)
    return report, model


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls side by side: engines that compile."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(lambda call: call(), calls)]


def same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Whether all logits have the same bits."""
    return all(np.array_equal(*pair) for pair in zip(some, others, strict=True))


def apart(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest difference of logits, in standard deviations."""
    pairs = zip(some, others, strict=True)
    return max(float(np.abs(a - b).max() / b.std()) for a, b in pairs)


def in_turn(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list]:
    """Each case once a round: all meet the machine's better and worse times."""
    found: dict[str, list] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(round(case(), 4))
    return found


def call_us(call: Callable[[], Any], count: int = 100) -> float:
    """Median microseconds until a call returns, the device idle before each."""
    took = []
    for _ in range(count):
        begun_s = time.perf_counter()
        out = call()
        took.append(time.perf_counter() - begun_s)
        jax.block_until_ready(out)
    return 1e6 * statistics.median(took)


def call_ms(call: Callable[[], Any], count: int = 4) -> float:
    """Mean milliseconds of calls, each of which is waited for."""
    begun_s = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(call())
    return MS * (time.perf_counter() - begun_s) / count


def profile(call: Callable[[], Any], steps: int, top: int = 16, host=False) -> dict:
    """What the GPU did in `steps` steps by stream, and the host by thread.

    Args:
      top: kernels that are named.
      host: with its threads, whose calls hold one another: times overlap.
    Returns:
      launches and busy milliseconds a step; idle milliseconds a step in gaps below .1
      ms (between kernels) and above (between programs); the `top` kernels by time:
      microseconds and launches a step.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        file = next(Path(folder).rglob("*.xplane.pb"))
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                on_gpu = "GPU" in plane.name and "Stream" in line.name
                if on_gpu or (host and plane.name == "/host:CPU"):
                    events = [*line.events]
                    if len(events) >= steps:  # others say nothing of a step
                        found[f"{line.name} {len(found)}"] = _line(events, steps, top)
    return found


def _line(events: list, steps: int, top: int) -> dict:
    spent_ns, launches = Counter(), Counter()
    for event in events:
        spent_ns[event.name] += event.duration_ns
        launches[event.name] += 1
    ordered = sorted(events, key=lambda event: event.start_ns)
    gaps_ns, end_ns = [], ordered[0].start_ns
    for event in ordered:
        gaps_ns.append(max(0, event.start_ns - end_ns))
        end_ns = max(end_ns, event.start_ns + event.duration_ns)
    return {
        "launches": len(events) / steps,
        "busy_ms": sum(spent_ns.values()) / steps / 1e6,
        "short_gaps_ms": sum(gap for gap in gaps_ns if gap < 1e5) / steps / 1e6,
        "long_gaps_ms": sum(gap for gap in gaps_ns if gap >= 1e5) / steps / 1e6,
        "kernels": {
            name[:90]: [round(ns / steps / 1e3, 2), launches[name] / steps]
            for name, ns in spent_ns.most_common(top)
        },
    }
