"""A traced random model chooses what the trace chose, in whichever engine it runs."""

from contextlib import ExitStack

import jax
import numpy as np
import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import ConfigError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.studies.speed import traced, traced_cases
from moe_edge.studies.speed.models import olmoe_config
from moe_edge.studies.speed.traced_model import TracedReader, distinct, trace_choices
from moe_edge.workload.traces import DECODE, Trace

STEPS, LAYERS, K = 10, 2, 3


def random_trace(num_experts=20) -> Trace:
    rng = np.random.default_rng(0)
    rows = STEPS * LAYERS
    ids_TK = np.stack([rng.permutation(num_experts)[:K] for _ in range(rows)])
    return Trace(
        num_experts=num_experts,
        top_k=K,
        request=np.zeros(rows, np.int32),
        phase=np.full(rows, DECODE, np.int32),
        step=np.repeat(np.arange(5, 5 + STEPS, dtype=np.int32), LAYERS),
        layer=np.tile(np.arange(LAYERS, dtype=np.int32), STEPS),
        ids_TK=ids_TK.astype(np.int32),
        weights_TK=np.full((rows, K), 1 / K, np.float32),
    )


def small_hf_config(top_k=K):
    small = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = olmoe_config(3, "float32", experts=12) | small | heads
    return config | {"num_experts_per_tok": top_k}


def small_config(top_k=K):
    return config_from_hf(small_hf_config(top_k))


def test_distinct_takes_modulo_and_the_next_free_id():
    assert distinct([3, 15, 4], 12) == [3, 4, 5]
    assert distinct([11, 23], 12) == [11, 0]


def test_every_layer_repeats_the_trace():
    config = small_config()
    chosen_SLK = trace_choices(random_trace(), config)
    assert chosen_SLK.shape == (STEPS, 3, K)
    # The model has a layer more than the trace, which starts again.
    np.testing.assert_array_equal(chosen_SLK[:, 2], chosen_SLK[:, 0])
    reader = TracedReader(config, chosen_SLK, np.float32)
    engine = ResidentEngine(load_weights(reader))
    seen_SLK = np.zeros_like(chosen_SLK)
    session = engine.new_session(1, STEPS + 1)
    engine.prefill(session, [[0]])
    active_B = jax.device_put(np.ones(1, bool))
    for step in range(1, STEPS):
        token_B = jax.device_put(np.array([step], np.int32))

        def note(layer, routing, step=step):
            seen_SLK[step, layer] = np.asarray(routing.ids_TK)[0]

        engine.decode(session, token_B, active_B, note)
    np.testing.assert_array_equal(seen_SLK[1:], chosen_SLK[1:])


def test_a_trace_with_too_few_ranks_is_refused():
    with pytest.raises(ConfigError, match="3 experts a token"):
        trace_choices(random_trace(), small_config(top_k=4))


class StubCase:
    """A case of a batch; what it measured is given."""

    def __init__(self, batch):
        self.batch, self.label = batch, f"batch{batch}" if batch else "prefill"


def test_rows_compare_with_the_larger_of_resident_time_and_missed_bytes():
    cases, found = {}, {}
    for mode, budget, took_ms, moved_bytes in (
        ("resident", "100%", [2.0, 4.0, 3.0], 0),
        ("fused", "25%", [30.0, 20.0, 25.0], 4 * traced.STEPS[1] * 10**6),
        ("layered", "50%", [6.0, 8.0, 9.0], traced.STEPS[1] * 10**5),
    ):
        cases[mode, budget, 1] = StubCase(1)
        moved = {"hit_ratio": 0.5, "bytes_moved": moved_bytes}
        found[mode, budget, 1] = [(ms, moved) for ms in took_ms]
    cases["resident", "100%", 0] = StubCase(0)
    found["resident", "100%", 0] = [(7.0, {"hit_ratio": None, "bytes_moved": 0})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "_read_share", lambda *_: {"limit_fraction": 0.25})
        rates = {"link": 2e8, "memory": 1.0}
        _, fused, layered, prefill = traced._rows("m", cases, found, None, rates)
    # 4 MB a step at 200 MB/s are 20 ms, above the resident 3 ms; 0.1 MB are 0.5 ms.
    assert fused["case"] == "traced/m/batch1/fused/25%"
    assert (fused["missed_ms"], fused["over_bound"]) == (20, 25 / 20)
    assert fused["limit_fraction"] == pytest.approx(25 / 20 / 1.25)
    assert (layered["missed_ms"], layered["over_bound"]) == (0.5, 8 / 3)
    assert layered["round_ratios"] == [3, 2, 3] and prefill["ours"] == 7
    answer = traced.answer_of([fused, layered, prefill])
    assert "fused 1.25 to 1.25, layered 2.67 to 2.67" in answer


def test_read_share_counts_each_chosen_expert_of_a_step_once():
    config = small_config()
    chosen_SLK = np.zeros((64, 3, K), np.int32)
    chosen_SLK[:] = np.arange(K)  # the same three, whatever the row
    engine = ResidentEngine(load_weights(TracedReader(config, chosen_SLK[:16], "f4")))
    case = traced.Case(engine, 8, 64)
    share = traced._read_share(case, chosen_SLK, took_ms=2.0, rate=1e9)
    weights = engine.weights
    dense = sum(array.nbytes for array in jax.tree.leaves(weights.layers))
    record = weights.experts[0].nbytes / 12
    step_bytes = dense + weights.top["head"].nbytes + 3 * K * record
    assert share["bytes_per_step"] == step_bytes
    assert share["limit_fraction"] == pytest.approx(1e3 * step_bytes / 1e9 / 2)


def test_no_shape_and_an_unknown_one_are_refused():
    with pytest.raises(ConfigError, match="number of model shapes .* got 0"):
        traced.TracedSettings(shapes=())
    with pytest.raises(ConfigError, match="unknown model shape 'magic'"):
        traced.TracedSettings(shapes=("magic",))


def test_no_budget_and_an_unknown_one_are_refused():
    with pytest.raises(ConfigError, match="number of budgets .* got 0"):
        traced.TracedSettings(budgets=())
    with pytest.raises(ConfigError, match="unknown budget '75%'"):
        traced.TracedSettings(budgets=("75%",))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"prefill": False}, ["resident 1 8", "fused 25% 1 8", "fused 50% 1 8"]),
        ({"budgets": ("50%",)}, ["resident 1 8 0", "fused 50% 1 8 0"]),
    ],
)
def test_settings_leave_out_what_takes_long_to_compile(settings, expected):
    config = small_config()
    reader = TracedReader(config, trace_choices(random_trace(), config), np.float32)
    given = traced.TracedSettings(ways=("fused",), **settings)
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for way, budget, batch in dict(
            traced_cases.cases_of(reader, stack, STEPS, given)
        ):
            name = way if way == "resident" else f"{way} {budget}"
            found[name] = f"{found.get(name, name)} {batch}"
    assert [*found.values()] == expected


@pytest.mark.slow
def test_the_suite_runs_all_engines_over_one_model(monkeypatch):
    monkeypatch.setattr(traced, "models", lambda shapes: {"tiny": small_hf_config()})
    monkeypatch.setattr(traced, "trace_path", lambda settings: "")
    monkeypatch.setattr(traced, "read_trace", lambda path, num_experts: random_trace())
    monkeypatch.setattr(traced, "device_bandwidth", lambda: 1e9)
    monkeypatch.setattr(traced, "link_rate", lambda: 1e9)
    for module in (traced, traced_cases):
        monkeypatch.setattr(module, "STEPS", {1: 3, 8: 2})
        monkeypatch.setattr(module, "PROMPT", 16)
    rows = traced.traced_rows(traced.TracedSettings(repeats=2), None)
    assert len(rows) == 3 + 2 * (2 + 3)
    hits = {row["case"]: row.get("hit_ratio") for row in rows}
    # The same experts, the same LRU: both modes miss alike.
    for case in ("batch1", "batch8"):
        for budget in traced_cases.BUDGETS:
            where = f"traced/tiny/{case}"
            assert hits[f"{where}/fused/{budget}"] == hits[f"{where}/layered/{budget}"]
