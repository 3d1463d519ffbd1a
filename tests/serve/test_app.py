"""The server as its clients see it, over a real socket and a tiny model."""

import asyncio
import json
import re
import threading

import pytest

from moe_edge.schedule.request import Request
from moe_edge.serve import grammar
from moe_edge.serve.errors import ApiError
from moe_edge.serve.logprobs import prompt_tokens
from moe_edge.serve.text_ends import StopText, TextEnds
from tests.support.live_server import (
    MAX_BATCH,
    events_of,
    live_server,
    read_reply,
    slots,
    text_of,
)


@pytest.fixture(scope="module")
def server():
    with live_server() as running:
        yield running


def alone(server, prompt: str, new: int, **options) -> str:
    """The text that a driver without a server gives."""
    from moe_edge.schedule.continuous import Continuous
    from moe_edge.schedule.loop import RequestLoop
    from moe_edge.serve.driver import Driver

    tokenizer = server.model.tokenizer
    (ids,) = tokenizer.encode_batch([prompt])
    ends = TextEnds(tokenizer, context=ids, eos_ids=server.model.eos_ids)
    driver = Driver(slots(), RequestLoop(Continuous(MAX_BATCH)))
    asked = Request(prompt=tuple(ids), new_tokens=new, floor=2, ends=ends, **options)
    driver.submit(asked)
    while driver.is_busy:
        driver.step()
    ends.finish()
    return ends.take().text


def test_completion_is_the_engines_text_streamed_or_not():
    with live_server() as server:
        plain = server.complete(max_tokens=20)
        streamed = server.complete(max_tokens=20, stream=True)
    expected = alone(server, "The river", 20)  # the slots are free again
    body = plain.json
    assert plain.status == 200 and plain.headers["content-type"] == "application/json"
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"][0]["text"] == expected
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    own = usage["moe_edge"]
    assert (own["k_min"], own["k_max"], own["ended_by"]) == (2, 2, "length")
    assert own["queue_ms"] >= 0 and own["ttft_ms"] >= own["queue_ms"]
    assert streamed.status == 200
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = streamed.events
    assert events[-1] == "[DONE]" and text_of(events) == expected
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in events[:-1])


def test_stream_ends_with_usage_if_asked(server):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = server.complete(**options).events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in events)


def test_choices_are_requests_of_following_seeds(server):
    rule = {"temperature": 1.0, "max_tokens": 12}
    both = server.complete(n=2, seed=5, **rule).json["choices"]
    singles = [server.complete(seed=5 + i, **rule).json["choices"][0] for i in (0, 1)]
    assert [each["text"] for each in both] == [each["text"] for each in singles]
    assert [each["index"] for each in both] == [0, 1]
    events = server.complete(n=2, seed=5, stream=True, **rule).events
    texts = ["", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [each["text"] for each in both]


def test_prompts_of_one_request_run_together(server):
    before = len(server.seen.ends)
    body = server.complete(prompt=["The river", "How many sacks"], n=2).json
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == texts[1] == server.complete().json["choices"][0]["text"]
    assert texts[2] == texts[3] != texts[0]
    assert body["usage"]["completion_tokens"] == 32
    ends = server.seen.ends[before:]
    assert {endpoint for endpoint, _ in ends} == {"/v1/completions"}
    assert [row.state for _, row in ends] == ["finished"] * 5


def test_chat_streamed_is_chat_unstreamed(server):
    body = {
        "messages": [{"role": "user", "content": "How many sacks are there?"}],
        "max_tokens": 10,
        "temperature": 0,
    }
    plain = server.post("/v1/chat/completions", body).json
    message = plain["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"]
    events = server.post("/v1/chat/completions", body | {"stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == message["content"] and events[-1] == "[DONE]"


def test_logprobs_and_echo_come_through(server):
    body = server.complete(prompt="The mill", echo=True, logprobs=2, max_tokens=3).json
    logprobs = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"].startswith("The mill")
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == body["usage"]["total_tokens"]


def test_models_and_tokenizer_routes(server):
    listing = server.get("/v1/models").json
    assert [entry["id"] for entry in listing["data"]] == ["tiny"]
    assert listing["data"][0]["moe_edge"]["max_context"] == 128
    assert server.get("/v1/models/tiny").json == listing["data"][0]
    missing = server.get("/v1/models/other")
    assert (missing.status, missing.code) == (404, "model_not_found")
    tokens = server.post("/tokenize", {"prompt": "naïve café"}).json["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json
    assert text == {"prompt": "naïve café"}
    info = server.get("/tokenizer_info").json
    assert info["model_max_length"] == 128 and info["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods_are_answered_in_shape(
    server, method, path, status, code
):
    reply = server.ask(method, path)
    assert (reply.status, reply.code) == (status, code)
    if status == 405:
        assert reply.headers["allow"] in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        (b'{"prompt": NaN}', 400, "invalid_json", None),
        (b'{"prompt": "\\ud800"}', 400, "invalid_json", None),
        ({"prompt": "a", "nonsense": 1}, 400, "unknown_parameter", "nonsense"),
        ({"prompt": "a", "min_k": 3}, 400, "invalid_value", "min_k"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        ({"prompt": "a", "quality": 0.9}, 400, "quality_unmeasured", "quality"),
        ({"prompt": [1, 320]}, 400, "invalid_value", "prompt"),
        ({"prompt": "a b" * 100}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 900_000}, 400, "context_length_exceeded", "prompt"),
    ],
)
def test_bad_bodies_are_refused(server, body, status, code, param):
    reply = server.post("/v1/completions", body)
    assert (reply.status, reply.code) == (status, code)
    assert reply.json["error"]["param"] == param


def test_choices_of_a_long_body_are_made_in_a_thread_and_share_their_stops(
    server, monkeypatch
):
    made, threads = [], []

    def counted(text):
        made.append(text)
        threads.append(threading.current_thread().name)
        return StopText(text)

    monkeypatch.setattr("moe_edge.serve.call.StopText", counted)
    stop = [f"{i:x>200}" for i in range(16)]
    assert server.complete(n=32, stop=stop, max_tokens=1).status == 200
    assert made == stop
    assert all(name.startswith("bodies") for name in threads)


@pytest.mark.parametrize("stream", [True, False])
def test_scores_of_long_prompts_are_written_in_a_thread(server, monkeypatch, stream):
    threads = []

    def noted(*given):
        threads.append(threading.current_thread().name)
        return prompt_tokens(*given)

    monkeypatch.setattr("moe_edge.serve.answers.prompt_tokens", noted)
    options = {"echo": True, "logprobs": 20, "max_tokens": 2, "stream": stream}
    server.complete(prompt="a" * 60, **options)
    server.complete(prompt="a", **options)
    assert [name.startswith("answers") for name in threads] == [True, False]


def test_health_counts_running_and_waiting():
    with live_server() as server:
        server.driver.hold()
        socks = [server.send_completion() for _ in range(3)]
        server.until(lambda: server.thread.num_waiting == 3)
        assert server.get("/health").json == {
            "status": "ok",
            "running": 0,
            "waiting": 3,
        }
        server.driver.let(1)
        server.until(lambda: server.thread.num_running == 2)
        assert server.get("/health").json["waiting"] == 1
        server.driver.let()
        assert {read_reply(sock).status for sock in socks} == {200}
        summary = server.thread.summary()
    assert summary["requests"] == summary["outcomes"]["finished"] == 3
    assert summary["generated_tokens"] == 24
    assert sum(len(stepped.tokens) for stepped in server.seen.steps) == 24


def test_full_queue_is_429_and_all_requests_are_accounted_for():
    with live_server(max_waiting=2) as server:
        server.driver.hold()
        socks = [server.send_completion(n=4)]  # two run, two wait
        server.until(lambda: server.thread.num_waiting == 4)
        refused = server.complete()
        assert (refused.status, refused.code) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        # Nobody reads how many rows a request wants then: it counts as one.
        assert server.complete(n=4).code == "queue_full"
        server.driver.let()
        assert {read_reply(sock).status for sock in socks} == {200}
        outcomes = server.thread.summary()["outcomes"]
        assert (outcomes["finished"], outcomes["refused"]) == (4, 2)
        assert server.complete().status == 200
        # As many as run and wait begin; more never will.
        assert server.complete(n=4).status == 200
        late = server.complete(n=5)
        assert (late.status, late.code) == (400, "invalid_value")
        assert "5 choices of one request, expected at most 4" in late.raw.decode()
    assert not server.driver.is_busy
    refused = len(server.seen.refusals)
    ended = [row.state for _, row in server.seen.ends]
    assert (
        refused + ended.count("refused")
        == server.thread.summary()["outcomes"]["refused"]
    )
    assert refused + len(ended) == server.thread.summary()["requests"]


@pytest.mark.parametrize("stream", [True, False])
def test_rows_of_a_request_begin_together_or_not_at_all(stream, monkeypatch):
    """Also where the driver says no after the event loop, which asks first."""
    with live_server(max_waiting=2) as server:
        monkeypatch.setattr(server.thread, "check_open", lambda *given: None)
        server.driver.hold()  # four of six find a place: two could run, two wait
        reply = server.complete(n=6, stream=stream)
        assert (reply.status, reply.code) == (429, "queue_full")
        server.until(lambda: not server.driver.is_busy)
        outcomes = server.thread.summary()["outcomes"]
        assert (outcomes["cancelled"], outcomes["refused"]) == (4, 2)
        assert server.thread.summary()["requests"] == 6
        # The refusal is told first, and answered before the ends are told.
        server.until(lambda: len(server.seen.ends) == 5)
        assert len(server.seen.refusals) == 1
        server.driver.let()
        assert server.complete(n=2, stream=stream).status == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_client_that_goes_cancels_its_rows(stream, when):
    with live_server() as server:
        server.driver.hold()
        stays = server.send_completion(max_tokens=30, min_k=1)
        server.until(lambda: server.thread.num_waiting == 1)
        goes = server.send_completion(n=2, stream=stream, max_tokens=60)
        server.until(lambda: server.thread.num_waiting == 3)
        if when == "running":
            server.driver.let(4)
            server.until(lambda: server.driver.num_steps == 4)
        goes.close()
        server.until(lambda: server.driver.loop.outcomes["cancelled"] == 2)
        assert server.driver.num_running + server.driver.num_waiting == 1
        server.driver.let()
        reply = read_reply(stays).json
        assert (
            reply["choices"][0]["text"]
            == server.complete(max_tokens=30, min_k=1).json["choices"][0]["text"]
        )
        server.until(lambda: not server.thread._open)


def test_deadline_while_waiting_is_504_and_while_running_ends_the_text():
    with live_server() as server:
        clock = server.driver.clock
        late, server.driver.clock = [0.0], lambda: clock() + late[0]
        server.driver.hold()
        runs = server.send_completion(max_tokens=100, deadline_ms=600_000)
        other = server.send_completion(max_tokens=100, deadline_ms=600_000)
        server.until(lambda: server.thread.num_waiting == 2)
        server.driver.let(3)
        server.until(lambda: server.driver.num_steps == 3)
        waits = server.complete(deadline_ms=1)
        assert (waits.status, waits.code) == (504, "deadline_exceeded")
        assert waits.headers["x-should-retry"] == "false"
        late[0] = 600.0
        server.until(lambda: not server.driver.loop.open)
        for sock in (runs, other):
            body = read_reply(sock).json
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] < 100
            assert body["usage"]["moe_edge"]["ended_by"] == "deadline"
        assert server.driver.loop.outcomes["expired"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_choices_that_wait_at_the_deadline_are_cut_as_those_that_run(stream):
    with live_server() as server:
        clock = server.driver.clock
        late, server.driver.clock = [0.0], lambda: clock() + late[0]
        server.driver.hold()
        options = {"n": 3, "max_tokens": 100, "deadline_ms": 600_000}
        sock = server.send_completion(stream=stream, **options)
        server.until(lambda: server.thread.num_waiting == 3)
        server.driver.let(3)
        server.until(lambda: server.driver.num_steps == 3)
        late[0] = 600.0
        reply = read_reply(sock)
        assert server.driver.loop.outcomes["expired"] == 1
    assert reply.status == 200
    if stream:
        *events, done = reply.events
        assert done == "[DONE]"
        choices = [event["choices"][0] for event in events]
    else:
        choices = reply.json["choices"]
        assert reply.json["usage"]["moe_edge"]["ended_by"] == "deadline"
    texts = ["", "", ""]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts[1] != "" == texts[2] and texts[0].startswith(texts[1])
    reasons = [each["finish_reason"] for each in choices if each["finish_reason"]]
    assert reasons == ["length"] * 3


def test_request_may_take_no_longer_than_the_server_allows():
    with live_server(request_s=0.001) as server:
        server.driver.hold()
        reply = server.complete(deadline_ms=10_000)
        assert (reply.status, reply.code) == (504, "deadline_exceeded")


def test_least_deadline_is_one(server):
    assert server.complete(deadline_ms=1e-323).code == "deadline_exceeded"


def test_failed_step_is_500_and_the_next_request_is_served(capfd):
    with live_server() as server:
        server.driver.failing = True
        plain = server.complete()
        assert (plain.status, plain.code) == (500, "engine_error")
        server.driver.failing = False
        first = server.complete().json["choices"][0]["text"]
        # In a stream that has begun: a line of the error, then the end.
        server.driver.hold()
        sock = server.send_completion(stream=True, max_tokens=50)
        server.until(lambda: server.thread.num_waiting == 1)
        server.driver.let(3)
        server.until(lambda: server.driver.loop.steps == 0)
        server.driver.failing = True
        server.driver.let(1)
        *events, last = events_of(read_reply(sock).raw)
        assert events and last["error"]["code"] == "engine_error"
        server.driver.failing = False
        server.driver.let()
        assert server.complete().json["choices"][0]["text"] == first
    assert server.error is None
    err = capfd.readouterr().err
    assert "RuntimeError in" in err and "secret" not in err


def test_three_failed_steps_in_a_row_end_the_server():
    with live_server() as server:
        server.driver.failing = True
        codes = [server.complete().code for _ in range(3)]
        assert codes[:2] == ["engine_error"] * 2
        assert codes[2] in ("engine_error", "engine_failed")
        server.wait_end()
    assert server.error.exit_code == 1
    assert str(server.error) == (
        "3 steps in a row failed, the last one by RuntimeError; see above"
    )


def test_step_that_computed_nothing_breaks_no_row_of_failed_ones():
    with live_server() as server:
        server.driver.failing = True
        for _ in range(2):
            assert server.complete().code == "engine_error"
        server.driver.hold()
        assert server.complete(deadline_ms=1).code == "deadline_exceeded"
        server.driver.let()
        assert server.complete().code in ("engine_error", "engine_failed")
        server.wait_end()
    assert server.error.exit_code == 1


def test_questions_are_answered_between_two_steps(server):
    async def ask(what):
        return await server.thread.ask(what)

    def answer(what):
        loop = server.service._loop
        return asyncio.run_coroutine_threadsafe(ask(what), loop).result(60)

    assert answer(lambda driver: threading.current_thread().name) == "engine"
    with pytest.raises(ZeroDivisionError):
        answer(lambda driver: 1 // 0)
    assert server.complete().status == 200


def test_loading_server_says_so():
    gate = threading.Event()

    def load():
        gate.wait()
        raise RuntimeError("no model")

    with live_server(load=load, ready=False) as server:
        health = server.get("/health")
        assert (health.status, health.json) == (503, {"status": "loading"})
        reply = server.complete()
        assert (reply.status, reply.code) == (503, "loading")
        assert int(reply.headers["retry-after"]) > 0
        assert server.get("/v1/models").status == 200
        gate.set()
        server.wait_end()
    assert str(server.error) == "no model"


def test_draining_server_finishes_what_is_open_and_takes_nothing_on():
    with live_server(drain_s=60.0) as server:
        server.driver.hold()
        socks = [server.send_completion(), server.send_completion(stream=True)]
        server.until(lambda: server.thread.num_waiting == 2)
        server.service.stop()
        server.until(lambda: server.thread.state == "draining")
        assert server.get("/health").json == {"status": "draining"}
        reply = server.complete()
        assert (reply.status, reply.code) == (503, "draining")
        assert int(reply.headers["retry-after"]) > 0
        server.driver.let()
        assert read_reply(socks[0]).status == 200
        assert events_of(read_reply(socks[1]).raw)[-1] == "[DONE]"
        server.wait_end()
    assert server.error is None
    assert server.thread.summary()["outcomes"]["finished"] == 2


def test_what_is_open_after_the_drain_is_told_and_cancelled():
    with live_server(drain_s=0.01) as server:
        server.driver.hold()
        plain, stream = (
            server.send_completion(stream=each, max_tokens=50) for each in (False, True)
        )
        server.until(lambda: server.thread.num_waiting == 2)
        server.driver.let(4)
        server.until(lambda: server.driver.num_steps == 4)
        server.service.stop()
        reply = read_reply(plain)
        assert (reply.status, reply.code) == (503, "draining")
        assert events_of(read_reply(stream).raw)[-1]["error"]["code"] == "draining"
        server.wait_end()
    summary = server.thread.summary()
    assert summary["requests"] == summary["outcomes"]["cancelled"] == 2


def test_second_order_to_end_cuts_the_drain_short():
    with live_server(drain_s=600.0) as server:
        server.driver.hold()
        sock = server.send_completion()
        server.until(lambda: server.thread.num_waiting == 1)
        server.service.stop()
        server.service.stop()
        assert read_reply(sock).code == "draining"
        server.wait_end()
    assert json.dumps(server.thread.summary())


def test_response_and_stream_say_the_same(server):
    asked = {"input": "How?", "max_output_tokens": 6, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 6}
    said = server.post("/v1/chat/completions", chat | {"temperature": 0}).json
    text = said["choices"][0]["message"]["content"]
    body = server.post("/v1/responses", asked).json
    (item,) = body["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", text)
    assert (body["status"], item["status"]) == ("incomplete", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["output_tokens"] == 6
    assert body["usage"]["moe_edge"]["ended_by"] == "length"
    raw = server.post("/v1/responses", asked | {"stream": True}).raw.decode()
    events = []
    for part in raw.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert (
        events[0]["type"] == "response.created" and not events[0]["response"]["output"]
    )
    assert events[-1]["type"] == "response.incomplete"
    last = events[-1]["response"]["output"][0]
    assert last["content"] == item["content"]
    reply = server.post("/v1/responses", asked | {"input": "a", "min_k": 99})
    assert (reply.status, reply.code) == (400, "invalid_value")


def test_answers_follow_their_grammar_beside_others_that_say_what_they_like(server):
    free = server.complete(max_tokens=12, ignore_eos=True).json
    asked = {"structured_outputs": {"regex": "(on|off)-[0-9]{3}"}, "temperature": 1.5}
    held = [server.send_completion(max_tokens=40, ignore_eos=True) for _ in range(2)]
    events = server.complete(**asked, seed=1, stream=True, max_tokens=24).events
    assert (
        server.complete(max_tokens=12, ignore_eos=True).json["choices"]
        == (free["choices"])
    )
    text = text_of(events)
    assert re.fullmatch("(on|off)-[0-9]{3}", text)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    several = server.complete(**asked, seed=1, n=3, max_tokens=24).json["choices"]
    assert several[0]["text"] == text
    assert len({each["text"] for each in several}) == 3
    cut = server.complete(**asked | {"max_tokens": 1}).json["choices"][0]
    assert cut["finish_reason"] == "length"
    for sock in held:
        sock.close()


def test_grammar_that_fails_on_its_way_is_an_error_of_its_request(server, monkeypatch):
    error = ApiError("invalid_value", "too complex; simplify it", param="x")
    monkeypatch.setattr(grammar.RowGuide, "failure", error)
    reply = server.complete(structured_outputs={"choice": ["a"]})
    assert (reply.status, reply.json["error"]["message"]) == (400, error.message)
    assert server.complete().status == 200
