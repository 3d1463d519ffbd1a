"""The server by its script: a process of its own, told to end by a signal."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.family_templates import FAMILY_TEMPLATES
from tests.support.tiny_checkpoint import TEXT, tiny_tokenizer
from tests.support.tiny_checkpoints import hf_folder

ROOT = Path(__file__).parents[2]
HALF = ("--device_memory", "50%")
SMALL = ("--port", 0, "--max_batch", 2, "--max_context", 64, "--prefill_chunk", 32)


@contextlib.contextmanager
def serving(folder: Path, *flags):
    """A server as a process, and the line that it printed when it was ready."""
    with (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, f"{ROOT}/launch/serve.py", *map(str, (*SMALL, *flags))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def ask(url: str, method: str, path: str, body=None, **headers):
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=300)
    with contextlib.closing(connection):
        if body is not None:
            body, headers = (
                json.dumps(body),
                headers | {"Content-Type": "application/json"},
            )
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.slow
def test_server_is_ready_answers_and_drains(tmp_path, tiny):
    log, key = tmp_path / "log.jsonl", tmp_path / "key"
    key.write_text("a-secret-key\n")
    flags = ("--checkpoint", tiny, "--request_log", log, "--api_key_file", key)
    with serving(tmp_path, *flags) as (process, ready):
        assert list(ready) == [
            *("ready", "url", "model", "k", "max_batch", "max_context"),
            *("compiled", "seconds"),
        ]
        assert (ready["k"], ready["max_batch"], ready["max_context"]) == (2, 2, 64)
        assert ready["model"] == str(tiny) and ready["url"].startswith("http://127.0.")
        url, bearer = ready["url"], {"Authorization": "Bearer a-secret-key"}
        assert ask(url, "GET", "/v1/models")[0] == 401
        body = {"prompt": "A private thought", "max_tokens": 9, "ignore_eos": True}
        body |= {"seed": 3}  # its text is looked for below
        status, raw = ask(url, "POST", "/v1/completions", body, **bearer)
        assert status == 200
        answer = json.loads(raw)
        assert answer["usage"]["completion_tokens"] == 9
        body |= {"stream": True, "min_k": 1, "model": str(tiny)}
        status, raw = ask(url, "POST", "/v1/completions", body, **bearer)
        assert status == 200 and raw.endswith(b"data: [DONE]\n\n")
        while process.poll() is None:  # further ones do not change how it ends
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, (tmp_path / "err").read_text()
    summary = json.loads(out.splitlines()[-1])
    assert list(summary) == ["requests", "outcomes", "generated_tokens", "uptime_s"]
    assert summary["requests"] == summary["outcomes"]["finished"] == 2
    assert sum(summary["outcomes"].values()) == 2
    assert summary["generated_tokens"] == 18 and summary["uptime_s"] > 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["finished"] * 2
    assert [line["k_min"] for line in lines] == [2, 1]
    assert lines[0]["endpoint"] == "/v1/completions" and lines[0]["new_tokens"] == 9
    told = log.read_text() + (tmp_path / "err").read_text() + out
    assert "private" not in told and "secret" not in told
    assert answer["choices"][0]["text"] not in told


@pytest.mark.slow
def test_offloaded_server_answers_and_tells_what_moved(tmp_path, tiny):
    flags = ("--checkpoint", tiny, "--device_memory", "50%")
    with serving(tmp_path, *flags) as (process, ready):
        body = {"prompt": "The mill", "max_tokens": 9, "ignore_eos": True}
        status, raw = ask(ready["url"], "POST", "/v1/completions", body)
        assert status == 200
        assert json.loads(raw)["usage"]["moe_edge"]["bytes_moved"] > 0
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 0, (tmp_path / "err").read_text()


@pytest.fixture
def with_states(tmp_path):
    """A tiny Qwen 3.5 as downloaded: a delta-net, attention, its own template."""
    family = "qwen3_5_moe_text"
    sizes = {"num_hidden_layers": 2, "vocab_size": 320}
    sizes |= {"max_position_embeddings": 1024}
    hf = hf_folder(tmp_path / "hf", family, **sizes)
    tiny_tokenizer().save(str(hf / "tokenizer.json"))
    config = {"chat_template": FAMILY_TEMPLATES[family], "eos_token": "<|end|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    return hf


def chat(url: str, number: int) -> tuple[str, int]:
    """What the model thinks or says in the chat of this number, and of how much."""
    talk = [{"role": "user", "content": TEXT[: 30 * (1 + number % 6)] + str(number)}]
    rule = {"temperature": 0, "max_tokens": 6 + 5 * (number % 5), "ignore_eos": True}
    thinks = {"chat_template_kwargs": {"enable_thinking": bool(number % 3)}}
    body = {"messages": talk} | rule | thinks
    status, raw = ask(url, "POST", "/v1/chat/completions", body)
    assert status == 200, raw
    answer = json.loads(raw)
    said, thought = (
        answer["choices"][0]["message"].get(name)
        for name in ("content", "reasoning_content")
    )
    assert bool(thought) == bool(number % 3) and bool(said) != bool(thought)
    assert answer["usage"]["completion_tokens"] == rule["max_tokens"]
    return said or thought, answer["usage"]["prompt_tokens"]


def hang_up(url: str) -> bytes:
    """The first bytes of a streamed answer, whose client then leaves."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    # So many tokens that the server notices long before the last, also when it is busy.
    body = {"prompt": TEXT[:90], "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse().read(20)


@pytest.mark.slow
def test_eight_chats_join_and_leave_where_layers_keep_states(tmp_path, with_states):
    """Each gets what it gets alone; the clients that leave free their rows."""
    flags = "--max_batch", 8, "--max_context", 1024, "--prefill_chunk", 64
    with serving(tmp_path, "--checkpoint", with_states, *flags) as (process, ready):
        url, chats = ready["url"], range(14)
        alone = [chat(url, number) for number in chats]
        assert max(tokens for _, tokens in alone) > 128
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            left = [threads.submit(hang_up, url) for _ in range(2)]
            found = [*threads.map(lambda number: chat(url, number), chats)]
            assert all(each.result().startswith(b"data: ") for each in left)
        assert found == alone
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (tmp_path / "err").read_text()
    outcomes = json.loads(out.splitlines()[-1])["outcomes"]
    assert outcomes["finished"] == 28 and sum(outcomes.values()) == 30


def test_dry_run_checks_and_binds_nothing_for_long(run_script, tiny):
    flags = ("--checkpoint", tiny, "--port", 0, "--dry_run")
    assert run_script("serve", *flags).summary == {"dry_run": True}


def test_port_in_use_is_told_before_the_model_is_loaded(run_script, tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_script("serve", "--checkpoint", tiny, "--port", port, "--dry_run")
    assert done.error == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another --port (0: any free one) or --host"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "0.0.0.0"), "host 0.0.0.0 is reachable by others and there is no"),
        (("--max_context", 129), "max_context of 129 tokens exceeds the model's"),
        (("--default_min_k", 3), "default_min_k 3 exceeds the model's K of 2"),
        (("--policy", "vip"), "unknown scheduling policy 'vip'"),
        (("--policy", "qos"), "qos"),
        (("--chat_template", "no.jinja"), "--chat_template no.jinja does not exist"),
        (("--k", 9), "9"),
        (("--activations", "int4"), "unknown activations 'int4'"),
        (("--activations", "int8"), "int8 meet weights in interleaved blocks"),
        (("--activations", "int8", "--servers", 2), "compute with exact activations"),
        (("--kv_cache", "int4"), "unknown kv_cache 'int4'"),
        (("--weights", "moved"), "unknown weights 'moved'; known: copied, mapped"),
        (("--weights", "mapped"), "is not in our format and holds no expert records"),
        (("--weights", "mapped", "--servers", 2), "--servers copy the experts"),
        (("--idle_client_s", 0), "idle_client_s must be positive, got 0"),
        (("--kv_memory", "2"), "kv_memory is '2', expected a size such as 2GiB"),
        (("--kv_memory", "50%"), "kv_memory is '50%', expected a size such as 2GiB"),
        (("--prompt_cache", "x"), "prompt_cache is 'x', expected a share of kv_memory"),
        (("--kv_memory", "1KiB", "--prompt_cache", "0"), "kv_memory 1KiB leaves"),
        (
            (*HALF, "--deterministic", "--gin_param", "offload.route = 'drop'"),
            "deterministic rows and route drop: what a row gets there depends",
        ),
        (
            (*HALF, "--deterministic", "--gin_param", "offload.assist = 'all'"),
            "deterministic rows and experts computed elsewhere (assist)",
        ),
        (
            (*HALF, "--gin_param", "offload.eviction = 'static_prompt'"),
            "follows one sequence, and a running batch has a row for each of many",
        ),
    ],
)
def test_bad_flags_are_one_line(run_script, tiny, flags, message):
    done = run_script("serve", "--checkpoint", tiny, "--port", 0, "--dry_run", *flags)
    assert message in done.error


def test_options_may_come_from_gin(run_script, tiny):
    given = ("--dry_run", "--gin_param", "serving.default_min_k = 9")
    done = run_script("serve", "--checkpoint", tiny, "--port", 0, *given)
    assert "default_min_k 9 exceeds the model's K of 2" in done.error


@pytest.mark.slow
def test_too_little_memory_for_caches_ends_the_process(run_process, tiny):
    flags = ("--port", 0, "--kv_memory", "1KiB", "--prompt_cache", "0")
    done = run_process("serve", "--checkpoint", tiny, *flags)
    assert done.code == 2
    assert "kv_memory 1KiB leaves" in done.stderr.splitlines()[-1]
