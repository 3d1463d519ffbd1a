"""Cases that hold every pair of parts run: lossless ones give the resident bits."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.generate import generate
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.offload.store import device_dtype
from moe_edge.workload.trace_writer import write_trace
from tests.support.compositions import PARTS, covering, is_refused, options_of
from tests.support.layered import StoreReader, forced_logits
from tests.support.refactored import parent_folder, write_random
from tests.support.running import SIZES, row, run, tokens_of
from tests.support.tiny_models import ALL, random_prompts

STEPS, LENGTHS = 6, (9,)
ROWS = [row(name, size, 6) for name, size in (("a", 9), ("b", 20), ("c", 3))]
ARRIVALS = [*zip((0, 0, 2), ROWS, strict=True)]
NEW = {each.id: each.max_new_tokens for each in ROWS}
GATES = ("linear", "calibrated")
NO_RECORDS = {"mmap"}  # of random models: nothing lies in a file


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("composition")


@functools.cache
def reader_of(name: str, folder):
    """An open checkpoint of a kind; sub-experts and mmap are files."""
    if name in GATES:
        parent = parent_folder(folder / f"{name}_parent", "qwen3_moe", name)
        return open_checkpoint(write_random(parent, folder / name, name))
    dtype = ml_dtypes.bfloat16 if name.endswith("_bf16") else np.float32
    return StoreReader(ALL[name.removesuffix("_bf16")], dtype=dtype)


class Model:
    """One checkpoint of a kind, its programs, and what the resident engine gives."""

    def __init__(self, name: str, folder):
        self.reader = reader_of(name, folder)
        self.config = self.reader.config
        self.prompts = random_prompts(self.config, LENGTHS)
        self.programs = LayerPrograms(self.config, device_dtype(self.reader.dtype))
        resident = ResidentEngine(load_weights(self.reader))
        self.wanted = forced_logits(resident, self.prompts, STEPS)
        self.trace = str(folder / f"{name}.csv.gz")
        engine = self.engine(OffloadOptions(device_memory="50%"), with_trace=True)
        generate(engine, self.prompts, 8)
        write_trace(self.trace, engine.trace.trace())
        engine.close()

    def engine(self, options, devices: int = 1, **more):
        """An engine; those of mode layered share programs. Devices are homes."""
        if devices > 1:
            more["devices"] = jax.local_devices()[:devices]
        return make_offloaded(self.reader, options, programs=self.programs, **more)

    @functools.cached_property
    def tokens(self) -> dict:
        """What the resident engine gives rows that join and leave."""
        resident = ResidentEngine(load_weights(self.reader))
        return tokens_of(run(RowSlots(resident, **SIZES), ARRIVALS))

    def run_rows(self, case):
        """Runs a case whose rows join and leave, and judges their tokens."""
        options = options_of(case, self.trace)
        with self.engine(options, case["devices"]) as engine:
            company = {"deterministic": case["rows"] == "deterministic"}
            found = tokens_of(run(RowSlots(engine, **SIZES, **company), ARRIVALS))
        assert {id: len(tokens) for id, tokens in found.items()} == NEW, case
        if case["route"] == "topk" and case["assist"] is None:
            assert found == self.tokens, case

    def run(self, case):
        """Runs a case and judges its logits."""
        if case["rows"] is not None:
            self.run_rows(case)
            return
        options = options_of(case, self.trace)
        with self.engine(options, case["devices"]) as engine:
            logits = forced_logits(engine, self.prompts, STEPS)
            lossless, movement = engine.lossless, engine.movement()
        assert np.isfinite(logits).all(), case
        assert lossless == (case["route"] == "topk"), case
        assert movement["hit_ratio"] <= 1, case
        if not lossless:
            return
        if case["assist"] is None:
            np.testing.assert_array_equal(logits, self.wanted, err_msg=str(case))
        else:
            error = np.abs(logits - self.wanted).max() / self.wanted.std()
            assert error < 1e-4, case


@functools.cache
def model_of(name: str, folder) -> Model:
    return Model(name, folder)


@functools.cache
def cases_of(name: str) -> list:
    """Cases of a covering array with a model; it is the same in every process."""

    def fits(case) -> bool:
        model = case.get("model")
        if case.get("memory") in NO_RECORDS and model not in (None, *GATES):
            return False
        if model in GATES and case.get("slot_plan") == "planned":
            return False  # its numbers are of other models
        keeps_router = model == "calibrated" and case.get("route", "topk") != "topk"
        return not (keeps_router or is_refused(case))

    found = covering(fits)
    assert len(found) <= 160
    return [case for case in found if case["model"] == name]


def test_cases_of_mode_layered_run(folder):
    cases = [case for case in cases_of("gqa") if case["mode"] == "layered"]
    assert len(cases) > 5
    for case in cases:
        model_of("gqa", folder).run(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS["model"])
def test_every_case_of_a_model_runs(name, folder):
    for case in cases_of(name):
        model_of(name, folder).run(case)
