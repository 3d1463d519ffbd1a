"""Suite `forms` at a size of seconds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.bench.speed import SuiteSettings
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.studies.speed import forms


def test_rows_compare_the_same_experts_of_the_same_tokens(monkeypatch):
    layout = RecordLayout(32, 16)
    monkeypatch.setattr(forms, "RecordLayout", lambda *_: layout)
    monkeypatch.setattr(forms, "device_bandwidth", lambda: 1e9)
    for name, value in {"TOKENS": (1, 3), "EXPERTS": 6, "CHOSEN": 2}.items():
        monkeypatch.setattr(forms, name, value)
    rows = forms.forms_rows(SuiteSettings(repeats=2), None)
    assert [row["case"] for row in rows] == ["forms/1", "forms/3"]
    assert all(len(row["runs"]["peer"]) == 2 for row in rows)
    for row in rows:
        # Read once: between two and six experts of 3,072 bytes, at 1 GB/s.
        read_us = row["limit_fraction"] * row["ours"]
        assert 2 * 3.072 <= read_us * (1 + 1e-6) and read_us <= 6 * 3.072


def test_a_run_adds_one_layer_after_another():
    layout, rng = RecordLayout(32, 16), np.random.default_rng(0)
    layers = [forms._records(rng, layout, np.dtype(np.float32)) for _ in range(2)]
    x_TD = jnp.asarray(rng.normal(size=(3, 32)), jnp.float32)
    ids_LTK = jnp.array([[[0, 1]] * 3, [[5, 4]] * 3], jnp.int32)
    got = jax.jit(functools.partial(forms._run, layout=layout))(x_TD, ids_LTK, layers)
    want, weights_TK = x_TD, jnp.full((3, 2), 1 / forms.CHOSEN)
    for ids_TK, records in zip(ids_LTK, layers, strict=True):
        want = want + run_experts(want, ids_TK, weights_TK, records, layout)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
