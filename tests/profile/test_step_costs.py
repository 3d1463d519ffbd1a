"""Costs of steps: an engine whose times follow a formula, and a real tiny one."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sizes import SlotSizes
from moe_edge.engine.weights import load_weights
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.profile import step_costs as module
from moe_edge.profile import step_timer
from moe_edge.profile.step_costs import measure_steps
from tests.support.layered import StoreReader
from tests.support.tiny_models import GQA

CHANGED_S, MOVED_S = 0.5, 0.25
KEY_S, PROMPT_KEY_S = 1e-6, 1e-7
ROW_S = 0.125  # of a prompt, beside the first


class Machine:
    """Row slots whose steps take what a formula says; also the clock."""

    def __init__(self, engine, max_rows, max_context):
        self.shapes = SlotSizes(
            max_rows=max_rows,
            max_context=max_context,
            prefill_chunk=128,
            prompt_rows=4,
        )
        self.rows, self.prompts, self.now_s = {}, [], 0.0
        self.decoded, self.size = (), 0  # of its last step

    @property
    def has_prompts(self):
        return bool(self.prompts)

    def admit(self, rows):
        self.prompts += rows
        self.rows |= {row.id: row.k or 3 for row in rows}

    def set_k(self, id, k):
        self.rows[id] = k

    def release(self, id):
        del self.rows[id]

    def prefill(self):
        if not self.prompts:
            return
        lengths = [len(row.prompt) for row in self.prompts]
        tokens = max(sum(lengths), 16)
        self.now_s += ROW_S * (len(self.prompts) - 1)
        self.now_s += 0.01 + 1e-4 * tokens * (self.prompts[0].k or 0)
        self.now_s += self.shape_seconds(self.shapes.prompt_shape(lengths))
        self.prompts = []

    def shape_seconds(self, shape):
        rows, size, capacity = shape
        return 1e-5 * rows * size * capacity / 64

    def batch_seconds(self, batch):
        rows, _, capacity = batch
        return 1e-5 * rows * capacity

    def rows_seconds(self, batch, rows=1, position=0):
        return self.batch_seconds(batch) + KEY_S * rows * position

    def chunk_seconds(self, size, start):
        return 1.0 + PROMPT_KEY_S * size * start

    def decode(self):
        size = self.shapes.rows_for(len(self.rows))
        self.now_s += CHANGED_S * (self.decoded != tuple(self.rows))
        self.now_s += MOVED_S * (size < self.size)
        self.decoded, self.size = tuple(self.rows), size
        self.now_s += 0.002 + 1e-3 * len(self.rows) + 1e-4 * sum(self.rows.values())


@pytest.fixture
def machine(monkeypatch):
    made = []

    def make(engine, **sizes):
        made.append(Machine(engine, **sizes))
        return made[0]

    monkeypatch.setattr(module, "RowSlots", make)
    for name in ("shape_seconds", "rows_seconds", "chunk_seconds"):
        monkeypatch.setattr(step_timer, name, getattr(Machine, name))
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: made[0].now_s)


class Engine:
    config, may_run_ahead, may_discard = GQA, True, True


@pytest.mark.usefixtures("machine")
def test_a_formula_is_found_again():
    found = measure_steps(Engine, max_batch=4, max_context=256, repeats=2)
    costs = found.costs
    assert costs.decode_s(3, 2) == pytest.approx(0.002 + 0.003 + 6e-4)
    assert costs.decode_s(6, 1.5) == pytest.approx(0.002 + 0.006 + 9e-4)
    one, four = 1e-5 * 64, 1e-5 * 4 * 32
    assert costs.prefill_s(50, 3) == pytest.approx(0.01 + 150e-4 + one)
    assert (costs.decode.sizes, costs.decode.ks) == ([1, 2, 3, 4], [1, 2, 3])
    for prompts in (2, 4):
        together = costs.prefill_s(50, 3, (4, 32, 64), prompts)
        expected = 0.01 + 150e-4 + four + (prompts - 1) * ROW_S
        assert together == pytest.approx(expected)
    assert costs.changed_s == pytest.approx(CHANGED_S)
    assert costs.moved_s == pytest.approx(MOVED_S) and costs.runs_ahead
    assert costs.key_s == pytest.approx(KEY_S)
    assert costs.prompt_key_s == pytest.approx(PROMPT_KEY_S)
    assert costs.batches == [
        [rows, 1, capacity, pytest.approx(1e-5 * capacity * rows)]
        for rows in (1, 2, 4)
        for capacity in (128, 256)
    ]
    assert [shape[:3] for shape in costs.shapes] == [
        *([1, 32, 64], [1, 32, 256], [1, 64, 64], [1, 64, 256], [1, 128, 256]),
        [4, 32, 64],
    ]
    assert costs.prefill.sizes == [16, 32, 33, 48, 64, 65, 96, 128]
    assert len(found.held_out) == 20 and max(found.errors().values()) < 1e-9
    stored = found.to_json()
    assert StepCosts.of_json(stored) == costs and len(stored["held_out"]) == 20


@pytest.mark.usefixtures("machine")
def test_a_step_off_the_tables_is_reported(monkeypatch):
    real = Machine.decode

    def slower_if_mixed(self):
        real(self)
        self.now_s += 0.05 * (len(set(self.rows.values())) > 1)

    monkeypatch.setattr(Machine, "decode", slower_if_mixed)
    errors = measure_steps(Engine, max_batch=4, max_context=256, repeats=1).errors()
    assert errors["decode_worst_error"] > 0.8 and errors["prefill_worst_error"] < 1e-9


@pytest.mark.usefixtures("machine")
def test_too_short_a_context_is_refused():
    with pytest.raises(ConfigError, match="context of 40 tokens is too short"):
        measure_steps(Engine, max_batch=2, max_context=40)


@pytest.mark.slow
def test_steps_of_a_real_engine_are_timed():
    engine = ResidentEngine(load_weights(StoreReader(GQA)))
    found = measure_steps(engine, max_batch=2, max_context=128, repeats=1)
    assert found.costs.decode_s(2, 3) > 0 and found.costs.prefill_s(100, 3) > 0
    assert all(point.measured_s > 0 for point in found.held_out)
    assert found.costs.prefill.sizes == [16, 32, 33, 48, 64, 65, 96, 127]
    assert [shape[:3] for shape in found.costs.shapes] == [
        *([1, 32, 128], [1, 64, 128], [1, 128, 128], [2, 32, 128], [2, 64, 128]),
    ]
    assert [batch[:3] for batch in found.costs.batches] == [[1, 1, 128], [2, 1, 128]]
    assert all(seconds > 0 for *_, seconds in found.costs.shapes + found.costs.batches)


def test_medians_are_raised_to_the_level_of_the_means():
    assert module._level([[1, 1, 2], [2, 2, 2]]) == pytest.approx(10 / 9)
    assert module._level([[1, 1, 99], [2, 2, 2]]) == pytest.approx(11 / 9)
