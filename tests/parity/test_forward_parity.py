"""Our logits against transformers' on the same random checkpoints, in float32."""

import importlib.util
import json

import numpy as np
import pytest

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers")):
    pytest.skip("needs the extra `parity`", allow_module_level=True)

import torch

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from tests.parity.models import CASES, FAMILIES, hf_checkpoint, hf_logits, load_model
from tests.support.tiny_checkpoints import raw_config
from tests.support.tiny_models import score_all

pytestmark = [
    pytest.mark.parity,
    # transformers warns about tiny vocabularies and deprecations of its own.
    pytest.mark.filterwarnings("ignore"),
]
# Those whose layers are another family's, with products packed otherwise, left out.
SOME = [family for family in FAMILIES if family != "qwen3_5_moe_text"]
TOLERANCE = 1e-4  # of the logits' standard deviation
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def engine_of(folder) -> ResidentEngine:
    return ResidentEngine(load_weights(open_checkpoint(folder)))


def relative_difference(ours, reference) -> float:
    return float(np.abs(ours - reference).max() / reference.std())


@pytest.mark.parametrize("case", CASES)
def test_converted_model_gives_transformers_logits(case, tmp_path):
    hf = hf_checkpoint(case, tmp_path / "hf")
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    ids = np.random.default_rng(0).integers(0, 101, (2, 70))
    ours = np.stack(score_all(engine_of(tmp_path / "ours"), ids.tolist()))
    reference = hf_logits(hf, ids).numpy()
    assert relative_difference(ours, reference) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_long_text_at_a_smaller_k(family, tmp_path):
    """Beyond windows and the context before scaling, with fewer experts a token."""
    positions = {"max_position_embeddings": 320}
    hf = hf_checkpoint(family, tmp_path / "hf", **positions)
    ids = np.random.default_rng(0).integers(0, 101, (1, 300))
    k = min(2, raw_config(family).get("num_experts_per_tok", 2))
    ours = score_all(load_engine(hf, with_tokenizer=False, k=k).engine, ids.tolist())
    config_path = hf / "config.json"
    config = json.loads(config_path.read_text())
    names = [n for n in TOP_K if n in config]
    # transformers' Phi chooses two, whatever its config says.
    own_k = 2 if family == "phimoe" else 2 * k - 1
    assert names and all(config[name] == own_k for name in names)
    config_path.write_text(json.dumps(config | dict.fromkeys(names, k)))
    reference = hf_logits(hf, ids).numpy()
    assert relative_difference(np.stack(ours), reference) <= TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_bfloat16_file_gives_float32_logits_of_its_weights(family, tmp_path):
    hf = hf_checkpoint(family, tmp_path / "hf", torch.bfloat16)
    ids = np.random.default_rng(0).integers(0, 101, (1, 70))
    ours = np.stack(score_all(engine_of(hf), ids.tolist()))
    with torch.no_grad():
        reference = load_model(hf, dtype=torch.float32)(
            torch.as_tensor(ids)
        ).logits.numpy()
    assert relative_difference(ours, reference) <= TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    hf = hf_checkpoint(family, tmp_path / "hf")
    prompts = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (9, 33)]
    ours = generate(engine_of(hf), prompts, 24).tokens
    model = load_model(hf)
    for prompt, tokens in zip(prompts, ours, strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor([prompt + tokens])).logits[0].numpy()
        steps = logits[len(prompt) - 1 : -1]
        best = np.sort(steps, axis=-1)
        # Equal wherever the margin exceeds ten times the tolerated difference.
        decided = best[:, -1] - best[:, -2] > 10 * TOLERANCE * logits.std()
        print(f"{family}: {int((~decided).sum())} of {len(decided)} tokens excluded")
        assert decided.mean() > 0.8
        np.testing.assert_array_equal(
            steps.argmax(-1)[decided], np.asarray(tokens)[decided]
        )
