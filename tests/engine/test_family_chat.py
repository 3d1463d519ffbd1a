"""A tiny checkpoint as users have it: converted, offloaded, asked.

One family of each chat template; the others' engines are those of `test_families.py`.
"""

import json

import pytest

import moe_edge as me
from moe_edge.convert.convert import convert_checkpoint
from tests.support.family_templates import FAMILY_TEMPLATES
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_checkpoints import hf_folder

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "mill?"}]
SWITCHES = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
LONG = {"max_position_embeddings": 400, "vocab_size": 320}
# Attention is full up to as many positions as their indexer chooses.
MORE = dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), {"index_topk": 400})
_FIRST = {template: family for family, template in reversed(FAMILY_TEMPLATES.items())}


@pytest.mark.parametrize("family", sorted(_FIRST.values()))
def test_family_is_converted_offloaded_and_spoken_to(family, tmp_path):
    hf = hf_folder(tmp_path / "hf", family, **LONG, **MORE.get(family, {}))
    tiny_tokenizer().save(str(hf / "tokenizer.json"))
    config = {"chat_template": FAMILY_TEMPLATES[family], "bos_token": "<|end|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    model = me.load(str(tmp_path / "ours"))
    asked = {"max_new_tokens": 6, "ignore_eos": True, "chat_template_kwargs": SWITCHES}
    with model.resident() as engine:
        whole = engine.chat(MESSAGES, **asked)
    with model.offload("50%") as engine:
        assert engine.chat(MESSAGES, **asked).tokens == whole.tokens
        assert engine.stats()["bytes_moved"] > 0
