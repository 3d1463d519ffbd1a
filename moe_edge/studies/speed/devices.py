"""Suite `devices`: how long offloaded experts wait for one link, and for four.

Homes are engines' own, their links emulated: on one device as well as on several, which
a machine may have or not. Both sides have as many slots in all. What is compared is the
time that an engine stands still for transfers, not the time of its steps: devices that
are cores of one machine compute no faster than one. Further rows say what each of
several devices holds of a resident model.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import (
    MS,
    Models,
    Rows,
    SuiteSettings,
    make_row,
    speed_study,
)
from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.offload_options import HOMES
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sharded import ShardedEngine, load_sharded
from moe_edge.engine.weights import load_weights, num_bytes
from moe_edge.offload.carrier import Carrier, Transfer
from moe_edge.studies.speed.offload_links import LATENCY_S

MB = 1e6
NUMBERS = (2, 3, 4, 8)  # of devices, as far as the machine has them


def shared_rows(checkpoint, prompts: np.ndarray) -> Rows:
    """A row a number of devices: bytes of one of them, at most all but the experts and
    ceil(E / N) records a layer.

    Args:
      prompts: int32 [B, S], whose logits have to have the bits of one device.
    Raises:
      RuntimeError: other logits.
    """
    reader, rows = open_checkpoint(checkpoint), []
    one = ResidentEngine(load_weights(reader))
    weights = one.weights
    whole = num_bytes((weights.top, weights.layers))
    records = [records for records in weights.experts if records is not None]
    want = _logits(one, prompts)
    for count in NUMBERS:
        if count > len(jax.local_devices()):
            break
        mesh = local_mesh(count)
        engine = ShardedEngine(load_sharded(reader, mesh), mesh)
        if not np.array_equal(_logits(engine, prompts), want):
            raise RuntimeError(f"{count} devices gave other logits than one")
        # Records, and the table of who holds which.
        shares = [
            -(-len(each) // count) * each.nbytes // len(each) + 4 * len(each)
            for each in records
        ]
        row = make_row(
            f"experts on {count} devices, one of them",
            [engine.device_bytes() / MB],
            "MB",
            peer=[one.device_bytes() / MB],
            peer_name="one device",
            limit=(whole + sum(shares)) / MB,
        )
        rows.append(row)
    return rows


def _logits(engine: ResidentEngine, prompts: np.ndarray) -> np.ndarray:
    session = engine.new_session(*prompts.shape)
    return np.asarray(engine.prefill(session, prompts.tolist()))


LINKS = 4
BLOCK_S = 4e-3  # of an expert over a link, besides its latency
LESS_BAR, BOUND_BAR = 1 / 3, 1.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesSettings(SuiteSettings):
    """Sizes of suite `devices`; `SuiteSettings` names the rest.

    Attributes:
      checkpoint: the model.
      share: of its experts in slots, of all devices together.
      batches: rows that decode together, a case each.
      prompt_tokens: of each row, from a book; steps: tokens after them, fed one by one.
    """

    checkpoint: str | Path = DEFAULT_MODEL
    share: float = 0.25
    batches: Sequence[int] = (1, 4, 16)
    prompt_tokens: int = 64
    steps: int = 8


class Waits(NamedTuple):
    """What a run stood still for, seconds; `bound`: of the busiest link alone."""

    logits: np.ndarray  # [1 + N, B, V]
    decode_s: float
    decode_bound_s: float
    prompt_s: float
    prompt_bound_s: float


class Busiest:
    """Over a queue: how long the busiest link takes for what is asked for between two
    waits, while something may be computed."""

    def __init__(self, queue):
        self._queue, self._asked, self._total_s = queue, [], 0.0
        self._ask, self._wait = queue.request_all, queue.wait

    def __enter__(self) -> "Busiest":
        self._queue.request_all, self._queue.wait = self._request, self._wait_for
        return self

    def __exit__(self, *_) -> None:
        del self._queue.request_all, self._queue.wait

    def _request(self, *given) -> list[Transfer]:
        found = self._ask(*given)
        self._asked += found
        return found

    def _wait_for(self, transfers) -> float:
        waited_s = self._wait(transfers)
        busy_s: dict[Carrier, float] = {}
        for transfer in self._asked:
            carrier = self._queue.carrier_of(transfer)
            busy_s[carrier] = busy_s.get(carrier, 0.0) + transfer.seconds
        self._total_s += max(busy_s.values(), default=0.0)
        self._asked.clear()
        return waited_s

    def taken_s(self) -> float:
        """Since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


def waits(engine: LayeredEngine, prompts: np.ndarray, fed_NB: np.ndarray) -> Waits:
    """Of prompts [B, S] and the tokens that are fed after them, from empty slots."""
    B, S = prompts.shape
    session = engine.new_session(B, S + len(fed_NB))
    engine.layer_step.empty()
    engine.reset_records()
    with Busiest(engine.queue) as busiest:
        logits = [engine.prefill(session, prompts.tolist())]
        jax.block_until_ready(logits)
        prompt_bound_s = busiest.taken_s()
        for tokens_B in fed_NB:
            arrays = engine.put((tokens_B, np.ones(B, bool)))
            logits.append(engine.decode(session, *arrays))
        jax.block_until_ready(logits)
        decode_bound_s = busiest.taken_s()
    found, counters = np.stack(logits), engine.layer_step.counters
    decode = counters[True].wait_s, decode_bound_s
    return Waits(found, *decode, counters[False].wait_s, prompt_bound_s)


def pages(tokenizer: Tokenizer, rows: int, tokens: int) -> np.ndarray:
    """int32 [rows, tokens] of a book that the default model was not trained on."""
    ids = np.asarray(tokenizer.encode(BOOKS.read_text(encoding="utf-8")), np.int32)
    first_B = np.linspace(0, len(ids) - tokens, rows).astype(int)
    return np.stack([ids[first : first + tokens] for first in first_B])


def devices_rows(settings: DevicesSettings, work_dir: Path) -> Rows:
    """Two rows a case and kind of homes: against one link, and against the bound."""
    there, rows = jax.local_devices(), []
    homes = [there[n % len(there)] for n in range(LINKS)]
    with Bench(settings.checkpoint) as bench:
        link = {
            "link_bytes_per_s": bench.store.block_bytes / BLOCK_S,
            "link_latency_s": LATENCY_S,
        }
        engines = {"one": bench.engine(studied(device_memory=settings.share, **link))}
        for kind in HOMES:
            options = studied(device_memory=settings.share / LINKS, homes=kind, **link)
            engines[kind] = bench.engine(options, devices=homes)
        for batch in settings.batches:
            tokens = settings.prompt_tokens
            read_BS = pages(bench.tokenizer, batch, tokens + settings.steps)
            given = read_BS[:, :tokens], read_BS[:, tokens:].T.copy()
            cases = {
                name: functools.partial(waits, engine, *given)
                for name, engine in engines.items()
            }
            runs = interleave(cases, settings.repeats)
            for kind in HOMES:
                check_same(kind, runs[kind][-1].logits, runs["one"][-1].logits)
                rows += _rows(f"batch {batch}, {kind} homes", runs["one"], runs[kind])
    on = f"{len(set(homes))} device" + "s" * (len(set(homes)) > 1)
    extra = {"emulated": True, "link": engines["one"].queue.link.describe()}
    return [row | extra | {"homes_on": on, "steps": settings.steps} for row in rows]


def suite_rows(settings: DevicesSettings, work_dir: Path) -> Rows:
    """Homes over links; then, where there are several devices, what one of them holds
    of shared experts."""
    rows, tokens = devices_rows(settings, work_dir), settings.prompt_tokens
    if len(jax.local_devices()) == 1:
        return rows
    prompts = pages(load_tokenizer(open_checkpoint(settings.checkpoint)), 1, tokens)
    return rows + shared_rows(settings.checkpoint, prompts)


def check_same(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Raises RuntimeError unless homes gave one device's bits."""
    if not np.array_equal(got, want):
        raise RuntimeError(f"{name} homes gave other logits than one device")


def _rows(case: str, one: Sequence[Waits], homes: Sequence[Waits]) -> Rows:
    rows, unit = [], "ms of waits"
    one_name = "one device with as many slots, one link"
    busiest = "the busiest home's bytes over one link, a layer at a time"
    for phase in ("decode", "prompt"):

        def of(runs, what, phase=phase):
            return [MS * getattr(run, f"{phase}_{what}") for run in runs]

        got, named = of(homes, "s"), f"{case}, {phase}"
        less = {"peer": of(one, "s"), "peer_name": one_name, "bar": LESS_BAR}
        # Of the links alone, without what a busy machine adds to a wait.
        less["links_ratio"] = float(np.median(of(homes, "bound_s")))
        less["links_ratio"] /= float(np.median(of(one, "bound_s")))
        bound = {"peer": of(homes, "bound_s"), "peer_name": busiest, "bar": BOUND_BAR}
        rows.append(make_row(named, got, unit, **less))
        rows.append(make_row(f"{named}, bound", got, unit, **bound))
    return rows


def devices_models(settings: DevicesSettings, work_dir: Path) -> Models:
    """The model that is run."""
    return [("default", Path(settings.checkpoint))]


STUDY = speed_study(
    "devices",
    f"How much less do offloaded experts wait with {LINKS} homes, each with a link of "
    "its own, than with one device of as many slots? What does each device hold where "
    "several share a resident model?",
    suite_rows,
    devices_models,
    settings=DevicesSettings,
    limit="Emulated links: 4 ms an expert and 50 us of latency; homes may share one "
    "device. Waits are counted, not steps: nothing here says how fast several devices "
    "compute, or what rows cost on their way between them.",
)
