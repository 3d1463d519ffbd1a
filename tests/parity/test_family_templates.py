"""Chat templates of the families, with switches, as `transformers` renders them."""

import itertools

import pytest

from moe_edge.serve.chat_template import ChatTemplate
from tests.support.family_templates import (
    CONVERSATIONS,
    FAMILY_TEMPLATES,
    SWITCHES,
    TOOL_TALK,
    TOOLS,
)
from tests.support.tokenizer_folders import NAMES, write_tokenizer

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, NAMES[0])
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
def test_template_renders_as_in_transformers(family, theirs):
    source = FAMILY_TEMPLATES[family]
    ours = ChatTemplate(source, family, theirs.special_tokens_map)
    prompts = set()
    for talk, switches, prompt in itertools.product(
        CONVERSATIONS, SWITCHES, (True, False)
    ):
        found = ours.render(talk, add_generation_prompt=prompt, variables=switches)
        options = {"add_generation_prompt": prompt, "tokenize": False} | switches
        wanted = theirs.apply_chat_template(talk, chat_template=source, **options)
        assert found == wanted, (talk, switches)
        prompts.add(found)
    assert len(prompts) >= 4


@pytest.mark.parametrize(
    ("family", "dialect"), [("qwen3_moe", "hermes"), ("qwen3_5_moe_text", "qwen_xml")]
)
def test_tools_and_their_calls_render_as_in_transformers(theirs, family, dialect):
    source = FAMILY_TEMPLATES[family]
    ours = ChatTemplate(source, family, theirs.special_tokens_map)
    assert ours.dialect.name == dialect
    options = {"add_generation_prompt": True, "tokenize": False}
    wanted = theirs.apply_chat_template(
        TOOL_TALK, tools=TOOLS, chat_template=source, **options
    )
    assert ours.render(TOOL_TALK, tools=TOOLS) == wanted
    assert "é <b>" in wanted and "<place> & 'time'" in wanted
