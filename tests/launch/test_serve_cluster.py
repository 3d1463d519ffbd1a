"""The server by its script, with experts on several servers."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from moe_edge.engine.load import load_engine
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from tests.launch.test_serve import ask, serving
from tests.support.our_checkpoints import OURS, write_ours

# One shape of steps: bits do not depend on company, and little is compiled.
SIZES = {"max_rows": 2, "max_context": 64, "prefill_chunk": 32, "deterministic": True}
PROMPTS = ["The river runs", "How many sacks are in the mill by the river now? " * 2]
ASKED = [(PROMPTS[n % 2][:40], 1 + n % 2, 14 + n) for n in range(4)]  # text, K, new


@pytest.fixture(scope="module")
def alone(tiny):
    return answers_of_one_machine(tiny)


def answers_of_one_machine(checkpoint, **how):
    """(text, log probabilities) of what is asked."""
    loaded = load_engine(str(checkpoint), **how)
    encode, decode = loaded.tokenizer.encode, loaded.tokenizer.decode
    slots, answers = RowSlots(loaded.engine, **SIZES), []
    for text, k, new in ASKED:
        prompt = tuple(encode(text))
        slots.admit(
            [SlotRow(id="a", prompt=prompt, max_new_tokens=new, k=k, top_logprobs=0)]
        )
        made = []
        while slots.is_busy:
            made += slots.step()
        slots.release("a")
        scores = [each.score.logprob for each in made]
        answers.append((decode([each.token for each in made]), scores))
    return answers


def complete(url, number: int):
    text, k, new = ASKED[number]
    rule = {"temperature": 0, "logprobs": 0, "ignore_eos": True}
    body = {"prompt": text, "max_tokens": new, "min_k": k} | rule
    status, raw = ask(url, "POST", "/v1/completions", body)
    assert status == 200, raw
    choice = json.loads(raw)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def num_come(url) -> int:
    """Requests that the server took on so far, of those not refused."""
    lines = ask(url, "GET", "/metrics")[1].decode().splitlines()
    names = r"requests_total\{.*finished.*\}|requests_(?:running|waiting)"
    found = (re.fullmatch(rf"moe_edge_(?:{names}) (\S+)", line) for line in lines)
    return sum(int(float(each[1])) for each in found if each)


def processes_of(pid: int) -> dict[int, int]:
    """Number in the cluster -> pid, of a launcher's processes."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found[int(words[-2])] = int(child)
    return found


@pytest.mark.slow
def test_several_servers_answer_as_one_and_lose_no_request(tmp_path, tiny, alone):
    flags = "--checkpoint", tiny, "--deterministic", "--servers", 2, "--slots", "10,9"
    with serving(tmp_path, *flags) as (process, ready):
        numbers = processes_of(process.pid)
        assert sorted(numbers) == [0, 1, 2]
        guided = {"prompt": "a", "structured_outputs": {"regex": "(on|off)-[0-9]{3}"}}
        status, raw = ask(ready["url"], "POST", "/v1/completions", guided)
        assert status == 200, raw
        said = json.loads(raw)["choices"][0]["text"]
        assert re.fullmatch("(on|off)-[0-9]{3}", said)
        with concurrent.futures.ThreadPoolExecutor(8) as threads:

            def all_at_once():
                order = [*range(4)] * 2
                return [threads.submit(complete, ready["url"], n) for n in order]

            assert [each.result() for each in all_at_once()] == alone * 2
            asked = all_at_once()
            concurrent.futures.wait(asked, return_when="FIRST_COMPLETED")
            os.kill(numbers[2], signal.SIGKILL)  # it held half of the experts
            assert [each.result() for each in asked] == alone * 2
            last = all_at_once()
            until_s = time.monotonic() + 300
            while num_come(ready["url"]) < 25:  # a later one is refused, rightly
                assert time.monotonic() < until_s
                time.sleep(0.001)
            process.send_signal(signal.SIGTERM)  # drains
            assert [each.result() for each in last] == alone * 2
        out, _ = process.communicate(timeout=300)
    told = (tmp_path / "err").read_text()
    assert process.returncode == 0, told
    assert json.loads(out.splitlines()[-1])["outcomes"]["finished"] == 25
    assert "server 1 is dead; others take over its experts" in told
    assert "programs compiled after ready: 0" in told
    assert not any(os.path.exists(f"/proc/{pid}") for pid in numbers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache"), [*((kind, "float32") for kind in OURS), ("q8_0", "bfloat16")]
)
def test_checkpoints_of_ours_are_served_by_several(tmp_path, kind, cache):
    ours = write_ours(tmp_path, kind)
    flags = "--checkpoint", ours, "--deterministic", "--servers", 2, "--kv_cache", cache
    with serving(tmp_path, *flags) as (_, ready):
        answers = [complete(ready["url"], number) for number in range(len(ASKED))]
        model = json.loads(ask(ready["url"], "GET", "/v1/models")[1])["data"][0]
    assert answers == answers_of_one_machine(ours, kv_cache=cache)
    assert model["moe_edge"]["lossless"] is (cache == "float32")


@pytest.mark.slow
def test_a_lossy_route_of_servers_says_what_it_changed(tmp_path, tiny):
    flags = "--checkpoint", tiny, "--servers", 2, "--slots", "10,9", "--route", "prefer"
    flags += "--gin_param", "serve.route_options = {'bonus': 3.0}"
    with serving(tmp_path, *flags) as (_, ready):
        model = json.loads(ask(ready["url"], "GET", "/v1/models")[1])["data"][0]
        body = {"prompt": "The river runs", "max_tokens": 12, "ignore_eos": True}
        said = json.loads(ask(ready["url"], "POST", "/v1/completions", body)[1])
    assert model["moe_edge"]["lossless"] is False
    assert 0 < said["usage"]["moe_edge"]["substituted_share"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slots", "9,9"), "--slots 9,9 are of servers; give --servers with them"),
        (("--servers", 2, "--device_memory", "25%"), "give no --device_memory"),
        (("--servers", 2, "--slots", "4,4"), "one copy of the model needs 16"),
        (("--servers", 2, "--slots", "9"), "one number for each of the 2 servers"),
        (("--servers", 0), "servers must be a positive whole number, got 0"),
        (("--servers", 2, "--kv_memory", "1KiB"), "kv_memory 1KiB leaves"),
        (("--route", "prefer"), "--route prefer is of servers; give --servers with it"),
        (("--servers", 2, "--route", "prefr"), "unknown route policy 'prefr'"),
        (
            ("--servers", 2, "--route", "prefer", "--deterministic"),
            "route prefer",
        ),
    ],
)
def test_bad_clusters_are_one_line(run_script, tiny, flags, message):
    done = run_script("serve", "--checkpoint", tiny, "--port", 0, "--dry_run", *flags)
    assert message in done.error


def test_dry_run_of_a_cluster(run_script, tiny):
    flags = "--checkpoint", tiny, "--port", 0, "--servers", 2, "--dry_run"
    assert run_script("serve", *flags).summary == {"dry_run": True}
