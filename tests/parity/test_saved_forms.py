"""Forms of a folder that transformers reads: heads, names, fused experts, configs."""

import importlib.util
import json

import numpy as np
import pytest

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers")):
    pytest.skip("needs the extra `parity`", allow_module_level=True)

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import ConfigError
from tests.parity.models import FAMILIES, hf_checkpoint, hf_logits
from tests.parity.test_forward_parity import (
    TOLERANCE,
    engine_of,
    relative_difference,
)
from tests.support.tiny_checkpoints import raw_config
from tests.support.tiny_models import score_all

pytestmark = [
    pytest.mark.parity,
    # transformers warns about tiny vocabularies and deprecations of its own.
    pytest.mark.filterwarnings("ignore"),
]
# What the family's class leaves open, or to a head whose half is odd.
UNSET = {
    "lfm2_moe": {"layer_types": ["full_attention", *["conv"] * 31]},
    "deepseek_v2": {"num_experts_per_tok": 6},  # see the last test
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
IDS = np.random.default_rng(0).integers(0, 101, (2, 40))


def rewrite(folder, change) -> None:
    """Replaces the tensors of a folder by `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, {"format": "pt"})


def assert_same_logits(folder) -> None:
    """Ours, of the folder and of its conversion, against transformers' of the same."""
    reference = hf_logits(folder, IDS).numpy()
    ours = np.stack(score_all(engine_of(folder), IDS.tolist()))
    assert relative_difference(ours, reference) <= TOLERANCE
    convert_checkpoint(folder, folder / "../ours", progress=False)
    convert_checkpoint(folder / "../ours", folder / "../hf", to="hf", progress=False)
    back = hf_logits(folder / "../hf", IDS).numpy()
    # Not bit for bit: torch's sums depend on where a tensor lies in memory.
    assert relative_difference(back, reference) <= TOLERANCE / 10


@pytest.mark.parametrize("family", FAMILIES)
def test_head_beside_a_tied_embedding_is_used_where_it_differs(family, tmp_path):
    folder = hf_checkpoint(family, tmp_path / "a", tie_word_embeddings=True)
    tied = hf_logits(folder, IDS)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": embed.flip(0)})
    assert (hf_logits(folder, IDS) - tied).std() > tied.std() / 2
    assert_same_logits(folder)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_head_alone_is_the_embedding_of_a_tied_model(tmp_path):
    folder = hf_checkpoint("qwen2_moe", tmp_path / "a")

    def renamed(tensors):
        return tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}

    rewrite(folder, renamed)
    assert_same_logits(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_of_transformers_5(family, tmp_path):
    folder = hf_checkpoint(family, tmp_path / "a", as_published=False)
    assert any(
        name.endswith("experts.gate_up_proj")
        for name in load_file(folder / "model.safetensors")
    )
    assert_same_logits(folder)


@pytest.mark.parametrize("family, hidden", [("olmoe", 40), ("gpt_oss", 64)])
def test_fused_layout_is_the_familys_where_shapes_are_equal(family, hidden, tmp_path):
    changes = {"hidden_size": hidden, "intermediate_size": hidden // 2}
    folder = hf_checkpoint(family, tmp_path / "a", as_published=False, **changes)
    tensors = load_file(folder / "model.safetensors")
    shape = tensors["model.layers.0.mlp.experts.gate_up_proj"].shape
    assert tuple(shape) == (6, hidden, hidden)
    assert_same_logits(folder)


# transformers itself looks for another word in front of Llama 4's.
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama4_text"])
def test_names_without_model_in_front(family, tmp_path):
    folder = hf_checkpoint(family, tmp_path / "a", as_published=False)
    rewrite(folder, lambda t: {n.removeprefix("model."): a for n, a in t.items()})
    assert_same_logits(folder)


@pytest.mark.parametrize(
    "family, field",
    [
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("deepseek_v2", "n_shared_experts"),
        ("deepseek_v3", "n_shared_experts"),
    ],
)
def test_shared_expert_without_neurons(family, field, tmp_path):
    assert_same_logits(hf_checkpoint(family, tmp_path / "a", **{field: 0}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_configs_to_dict_is_accepted(family):
    given = AutoConfig.for_model(family).to_dict() | UNSET.get(family, {})
    config = config_from_hf(given)
    assert config.num_layers == given["num_hidden_layers"]
    again = config_from_hf(AutoConfig.for_model(**raw_config(family)).to_dict())
    assert again.moe == config_from_hf(raw_config(family)).moe


def test_deepseek_v2_that_chooses_no_number_of_experts_runs_nowhere():
    """Its class leaves `num_experts_per_tok` null, with which transformers fails."""
    raw = raw_config("deepseek_v2", num_experts_per_tok=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    with pytest.raises(TypeError, match="argument 'k' must be int"):
        model(torch.as_tensor(IDS))
    with pytest.raises(ConfigError, match="num_experts_per_tok is null, expected an"):
        config_from_hf(AutoConfig.for_model("deepseek_v2").to_dict())
