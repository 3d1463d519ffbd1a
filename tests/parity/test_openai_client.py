"""The `openai` client against our server, as docs/serving.md shows (extra `eval`)."""

import functools
import json
import typing

import pytest

from tests.support.live_server import live_server

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
KEY = "a-key"
MESSAGES = [{"role": "user", "content": "How many sacks are there?"}]


# Short, for a context of 128 tokens of a few letters; thinks if it is told to.
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}"
    "{% if think %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("chat") / "chat.jinja"
    file.write_text(TEMPLATE)
    with live_server(key=KEY.encode(), chat_template=str(file)) as running:
        yield running


@pytest.fixture
def client(server):
    import openai

    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as found:
        yield found


def _completed(ask):
    """What `ask` gives for the first seed whose white space fits the context."""
    import openai
    import pydantic

    # How the client says 'cut off': to a parser, in a chat, in a stream.
    cut = (pydantic.ValidationError, openai.LengthFinishReasonError, RuntimeError)
    for seed in range(30):
        try:
            return ask({"seed": seed})
        except cut as error:
            last = error
    raise AssertionError("no answer was short enough") from last


def test_floor_of_a_completion_streamed_or_not(client):
    asked = {"model": "tiny", "prompt": "The river", "max_tokens": 12, "temperature": 0}
    texts = {}
    for k in (1, 2):
        extra = {"min_k": k, "ignore_eos": True}
        plain = client.completions.create(**asked, extra_body=extra)
        assert plain.usage.completion_tokens == 12
        assert plain.usage.moe_edge["k_min"] == plain.usage.moe_edge["k_max"] == k
        stream = client.completions.create(
            **asked,
            extra_body=extra,
            stream=True,
            stream_options={"include_usage": True},
        )
        *parts, last = stream
        texts[k] = "".join(part.choices[0].text for part in parts)
        assert texts[k] == plain.choices[0].text
        assert last.usage.moe_edge["k_max"] == k
    assert texts[1] != texts[2]


def test_floor_of_a_chat_streamed_or_not(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"min_k": 1, "ignore_eos": True}
    plain = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert plain.usage.moe_edge["k_max"] == 1
    assert len(plain.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = [*client.chat.completions.create(**asked, stream=True)]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == plain.choices[0].message.content


def test_errors_are_the_clients_own(client, server):
    import openai

    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="a", extra_body={"min_k": 3})
    assert (error.value.code, error.value.param) == ("invalid_value", "min_k")
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="a")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="wrong").models.list()
    assert error.value.code == "invalid_api_key"
    server.driver.hold()
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(
            model="tiny", prompt="a", extra_body={"deadline_ms": 1}
        )
    server.driver.let()
    assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")


def test_answer_is_parsed_into_a_model(client):
    import pydantic

    class Mill(pydantic.BaseModel):
        sacks: int
        windy: bool
        sort: typing.Literal["rye", "oats"]

    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 1.5}
    asked_mill = asked | {"max_tokens": 100, "response_format": Mill}
    parse = functools.partial(client.chat.completions.parse, **asked_mill)
    chat = _completed(lambda seed: parse(**seed))
    assert isinstance(chat.choices[0].message.parsed, Mill)
    found = client.chat.completions.create(
        **asked, seed=0, max_tokens=90, response_format={"type": "json_object"}
    )
    assert found.choices[0].message.content.lstrip().startswith("{")
    with pytest.raises(Exception, match='Unimplemented keys: \\["not"\\]') as error:
        client.completions.create(
            model="tiny",
            prompt="a",
            extra_body={"structured_outputs": {"json": {"not": {}}}},
        )
    assert error.value.param == "structured_outputs.json"


def test_conversation_of_two_tools_streamed(client):
    def offer(name, **properties):
        schema = {"type": "object", "properties": properties}
        schema |= {"required": [*properties], "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    wind = {"type": "string", "enum": ["north", "south"]}
    tools = [offer("grind", sacks={"enum": [1, 2, 3]}), offer("turn", wind=wind)]
    asked = {"model": "tiny", "tools": tools, "parallel_tool_calls": False}
    talk = [{"role": "user", "content": "a"}]

    for choice in ("grind", "turn"):
        named = {"type": "function", "function": {"name": choice}}
        given = asked | {"messages": talk, "tool_choice": named, "max_tokens": 100}

        def streamed(seed, given=given):
            with client.chat.completions.stream(**given, **seed) as stream:
                return [e.type for e in stream], stream.get_final_completion()

        events, found = _completed(streamed)
        message = found.choices[0].message
        assert "tool_calls.function.arguments.done" in events
        call = message.tool_calls[0]
        assert call.function.name == choice
        arguments = json.loads(call.function.arguments)
        if choice == "grind":
            assert arguments["sacks"] in (1, 2, 3)
        else:
            assert arguments["wind"] in ("north", "south")
        call = {"id": call.id, "type": "function", "function": {"name": choice}}
        call["function"]["arguments"] = "{}"
        talk = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"},
        ]
    plain = client.chat.completions.create(
        **asked, messages=talk[1:], tool_choice="none", max_tokens=5
    )
    assert plain.choices[0].message.tool_calls is None


def test_responses_of_text_a_schema_and_a_tool_streamed_or_not(client):
    import pydantic

    class Mill(pydantic.BaseModel):
        sort: typing.Literal["rye", "oats"]

    asked = {"model": "tiny", "input": "How?", "max_output_tokens": 90}
    plain = client.responses.create(**asked | {"max_output_tokens": 5}, temperature=0)
    assert plain.output_text and plain.status == "incomplete"
    stream = client.responses.create(
        **asked | {"max_output_tokens": 5}, temperature=0, stream=True
    )
    deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    parse = functools.partial(client.responses.parse, **asked, text_format=Mill)
    found = _completed(lambda seed: parse(extra_body=seed))
    assert isinstance(found.output_parsed, Mill)
    wind = {"type": "object", "properties": {"wind": {"enum": ["north"]}}}
    wind |= {"required": ["wind"], "additionalProperties": False}
    tool = {"type": "function", "name": "turn", "parameters": wind, "strict": True}
    asked |= {"tools": [tool], "parallel_tool_calls": False}
    talk = [{"role": "user", "content": "a"}]
    given = asked | {"input": talk, "tool_choice": "required"}

    def streamed(seed):
        with client.responses.stream(**given, extra_body=seed) as stream:
            return [event.type for event in stream], stream.get_final_response()

    events, response = _completed(streamed)
    assert "response.function_call_arguments.done" in events
    (call,) = response.output
    assert json.loads(call.arguments) == {"wind": "north"}
    talk = [
        *response.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    given = asked | {"input": talk, "max_output_tokens": 5, "temperature": 0}
    assert client.responses.create(**given, tool_choice="none").output_text


def test_thoughts_are_apart_in_a_stream(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**asked).choices[0].message
    assert plain.content and not hasattr(plain, "reasoning_content")
    asked["extra_body"] = {"chat_template_kwargs": {"think": True}, "ignore_eos": True}
    whole = client.chat.completions.create(**asked).choices[0].message
    assert whole.reasoning_content and not whole.content
    parts = [*client.chat.completions.create(**asked, stream=True)]
    deltas = [part.choices[0].delta for part in parts]
    found = "".join(getattr(each, "reasoning_content", None) or "" for each in deltas)
    assert found == whole.reasoning_content
