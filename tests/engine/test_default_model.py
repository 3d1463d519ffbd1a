"""The shipped model is what its card claims: small, whole, specialised by task."""

import json

import pytest

from moe_edge.bench.quickstart.run import score_domains, sum_up
from moe_edge.bench.quickstart.texts import held_out_texts
from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.specialisation import DomainScorer


@pytest.fixture(scope="module")
def loaded():
    return load_engine("default")


@pytest.fixture(scope="module")
def findings(loaded):
    return sum_up(score_domains(loaded, held_out_texts(1000, seed=7)))


def test_default_model_has_the_promised_shape_and_size():
    reader = open_checkpoint("default")
    config, moe = reader.config, reader.config.moe
    assert (config.model_type, moe.num_experts, moe.top_k) == ("qwen2_moe", 64, 8)
    assert moe.shared_dim > 0 and config.num_layers >= 6
    assert moe.expert_dim % 8 == 0 and moe.expert_dim // 8 % 8 == 0
    assert reader.dtype.name == "bfloat16"
    weights = sum(f.stat().st_size for f in DEFAULT_MODEL.glob("*.safetensors"))
    assert weights <= 35e6


def test_default_model_folder_is_a_complete_hf_checkpoint():
    names = {path.name for path in DEFAULT_MODEL.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "README.md", "loss.png"} <= names
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen2MoeForCausalLM"]


@pytest.mark.slow
def test_default_model_uses_experts_by_task(findings):
    assert findings.ratio >= 3.0


@pytest.mark.slow
def test_default_model_needs_its_experts(findings):
    # No loss forces more: see results/default_shapes.
    assert findings.total.lost_ratio > 0.005


def test_scorer_half_runs_half_the_experts(loaded):
    scorer = DomainScorer(loaded)
    assert scorer.half.config.moe.top_k * 2 == scorer.full.config.moe.top_k
