"""Templates of checkpoints and files, and what the sandbox keeps them from."""

import json
import time

import pytest

from moe_edge.core.checks import CheckpointError
from moe_edge.serve import template_limits
from moe_edge.serve.chat_template import ChatTemplate, find_template
from moe_edge.serve.errors import ApiError

TALK = [
    {"role": "system", "content": "Be {{ short }}."},
    {"role": "user", "content": "mill?"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_plain_template_where_there_is_none(tmp_path):
    for folder in (None, tmp_path):
        template = find_template(folder)
        assert template.name == "plain, built in" and template.adds_special
        assert template.render(TALK) == (
            "System: Be {{ short }}.\n\nUser: mill?\n\nAssistant:"
        )
        assert not template.render(TALK, add_generation_prompt=False).endswith(":")


def test_template_of_the_checkpoint(tmp_path):
    write_config(tmp_path, chat_template=CHATML)
    template = find_template(tmp_path)
    assert template.name == "tokenizer_config.json" and not template.adds_special
    assert template.render(TALK).endswith("mill?<|im_end|>\n<|im_start|>assistant\n")


def test_template_of_a_file_comes_first_and_has_special_tokens(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}")
    write_config(
        tmp_path, chat_template="x", bos_token={"content": "<s>"}, eos_token="</s>"
    )
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_template(tmp_path, file).render(TALK) == "<s>mill?</s>"
    assert find_template(tmp_path).render(TALK) == "own"


def test_template_named_default_of_several(tmp_path):
    named = [
        {"name": "tool_use", "template": "a"},
        {"name": "default", "template": "b"},
    ]
    write_config(tmp_path, chat_template=named)
    assert find_template(tmp_path).render(TALK) == "b"
    write_config(tmp_path, chat_template=named[:1])
    with pytest.raises(CheckpointError, match=r"templates \['tool_use'\], expected"):
        find_template(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ("[]", r"tokenizer_config.json is \[\], expected an object"),
        ("{", "tokenizer_config.json is not valid JSON"),
        ('{"chat_template": 5}', "chat_template is 5, expected text"),
        ('{"chat_template": "{% if %}"}', "chat template of tokenizer_config.json: "),
        ('{"chat_template": "{{ x }"}', "chat template of tokenizer_config.json: "),
    ],
)
def test_damaged_template_is_refused_at_the_start(tmp_path, config, message):
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        find_template(tmp_path)


def test_template_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat template .*/t is not UTF-8 text"):
        find_template(None, tmp_path / "t")
    with pytest.raises(OSError):
        find_template(None, tmp_path / "missing")


def test_template_has_what_hugging_face_gives_it():
    source = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}"
        "{% for m in messages %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ 2 * 3 }}"
        "{% for i in range(3) %}{{ i }}{% endfor %}{{ '-' * 5 }}"
    )
    prompt = ChatTemplate(source, "x").render([{"role": "user", "content": "<é>"}])
    assert prompt == '[{"role": "user", "content": "<é>"}]4True6012-----'


USER_FIRST = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('system!') }}{% endif %}"
    "{{ messages[0].content }}"
)
NO_SYSTEM = USER_FIRST.replace("!= 'user'", "== 'system'")
ALTERNATE = "{% for m in messages %}{{ raise_exception(m.role) }}{% endfor %}"
NEEDS_TWO = "{{ messages[1].content.split('l')[1] }}"


@pytest.mark.parametrize("source", [USER_FIRST, ALTERNATE, NEEDS_TWO, "{{ '-' * 5 }}"])
def test_template_that_refuses_some_conversations_is_accepted(tmp_path, source):
    write_config(tmp_path, chat_template=source)
    assert find_template(tmp_path).source == source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content[0].text.x }}", "UndefinedError: 'str object' has no"),
        ("{{ messages[0].role + 1 }}", "TypeError: can only concatenate"),
        ("{{ 'x' * 5000000 }}", "TooMuch: a text of more than 4194304 characters"),
        ("{{ messages.x.y }}", "UndefinedError: 'list object' has no attribute 'x'"),
        (NO_SYSTEM + "{{ messages.x.y }}", "UndefinedError: 'list object' has no"),
        (USER_FIRST + "{{ messages.x.y }}", "UndefinedError: 'list object' has no"),
    ],
)
def test_template_that_never_renders_is_refused_at_the_start(tmp_path, source, message):
    (tmp_path / "t.jinja").write_text(source)
    message = f"t.jinja renders no short conversation: {message}.*; fix it or give --ch"
    with pytest.raises(CheckpointError, match=message):
        find_template(None, tmp_path / "t.jinja")


def test_time_of_what_the_compiler_computes_is_bounded(monkeypatch):
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.2)
    start = time.thread_time()
    big = "{% autoescape 'x'|center(4000000)|title %}{% endautoescape %}"
    ChatTemplate(99 * big, "x")
    assert time.thread_time() - start < 1


def test_template_that_python_cannot_compile_is_refused():
    source = 30 * "{% for m in messages %}" + 30 * "{% endfor %}"
    with pytest.raises(CheckpointError, match="template of x: too many statically"):
        ChatTemplate(source, "x")


def test_template_that_goes_on_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.2)
    loop = "{% for x in 'x' * 100000 %}"
    (tmp_path / "t.jinja").write_text(loop + loop + "{% endfor %}{% endfor %}")
    start = time.thread_time()
    with pytest.raises(CheckpointError, match=r"TooMuch: more than 0\.2 s of comp"):
        find_template(None, tmp_path / "t.jinja")
    assert time.thread_time() - start < 0.5  # of all trials together


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 'x' * 1000000000 }}", "a text of more than 4194304 characters"),
        ("{{ 9 ** 99 }}", "a power of 99"),
        ("{% for i in range(1000000000) %}{% endfor %}", "100000 turns"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"
            "{% endfor %}",
            "100000 turns",
        ),
        ("{% for i in range(90000) %}{{ messages }}{% endfor %}", "4194304 char"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_template_that_refuses_or_runs_away_is_a_bad_request(source, message):
    with pytest.raises(ApiError, match=message) as caught:
        ChatTemplate(source, "x").render(TALK)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")
    assert caught.value.message.startswith("the chat template (x) refuses these")
