"""Floors from `min_k` and `quality`, and what clients are told of the model."""

import dataclasses
import json

import pytest

from moe_edge.core.checks import CheckpointError
from moe_edge.serve.body import floor_of
from moe_edge.serve.errors import ApiError
from moe_edge.serve.served_model import read_perplexities


@pytest.mark.parametrize(
    "min_k, quality, floor",
    [
        (None, None, 20),  # the server's default
        (4, None, 4),
        (None, 1, 32),
        (None, 0.9, 32),  # K 16 alone would do (10 / 11), but K 24 is worse
        (None, 0.86, 16),
        (None, 0.8, 8),
        (12, 0.8, 12),
        (12, 0.86, 16),
    ],
)
def test_floor_is_the_higher_of_both(model, min_k, quality, floor):
    model = dataclasses.replace(model, default_floor=20)
    assert floor_of(model, min_k, quality) == floor


@pytest.mark.parametrize("perplexities", [None, {8: 12.0}])
def test_quality_without_measurement_is_refused(model, perplexities):
    model = dataclasses.replace(model, perplexities=perplexities)
    with pytest.raises(ApiError, match="perplexity at K 32 in .* report.json") as error:
        floor_of(model, 4, 0.5)
    assert (error.value.code, error.value.param) == ("quality_unmeasured", "quality")
    assert floor_of(model, 4, None) == 4


def test_listing_names_the_model(model):
    (entry,) = model.listing()["data"]
    assert (entry["id"], entry["object"]) == ("tiny", "model")
    assert entry["moe_edge"] == {
        "k": 32,
        "max_context": 128,
        "vocab_size": 320,
        "lossless": True,
    }


def test_read_perplexities_of_a_report(tmp_path):
    assert read_perplexities(tmp_path) is None
    report = {"objective": 1, "ppl_by_k": {"4": 9.5, "1": None}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert read_perplexities(tmp_path) == {4: 9.5, 1: float("inf")}


@pytest.mark.parametrize("by_k", [None, [], {"a": 1}, {"4": "x"}, {"0": 2}, {"4": 0}])
def test_read_perplexities_rejects_report(tmp_path, by_k):
    (tmp_path / "report.json").write_text(json.dumps({"ppl_by_k": by_k}))
    with pytest.raises(CheckpointError, match="report.json: ppl_by_k is .*, expected"):
        read_perplexities(tmp_path)
