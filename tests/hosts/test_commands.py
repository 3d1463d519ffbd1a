"""Commands as two processes: what one alone computes, written and printed once."""

import concurrent.futures
import json
import signal
import time

import numpy as np
import pytest

from moe_edge.engine.load import load_engine
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.run import run_evaluate
from moe_edge.model.new_token import NewToken
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.request import Request
from moe_edge.serve.options import ServingOptions, make_driver
from tests.launch.test_serve import SMALL, ask
from tests.support.live_run import wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.two_processes import WAIT_S, TwoProcesses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny"))


def test_generate_and_evaluate_give_the_bits_of_one_process(tiny, tmp_path):
    """Generation in a few tokens and long prompts' logits: both at once."""
    tokens = np.random.default_rng(0).integers(1, 300, (3, 90)).astype(np.int32)
    np.save(tmp_path / "t.npy", tokens)
    texts = {"prompt": ["The river", "12 sacks"], "max_new_tokens": 12, "seed": 4}
    texts |= {"temperature": 0.8, "checkpoint": tiny}
    scored = {"checkpoint": tiny, "tokens": str(tmp_path / "t.npy")}
    flags = ["--checkpoint", tiny, "--max_new_tokens", 12, "--seed", 4]
    flags += ["--temperature", 0.8, "--prompt", "The river", "--prompt", "12 sacks"]
    logits = tmp_path / "l.npz"
    (tmp_path / "e").mkdir()
    given = "--checkpoint", tiny, "--tokens", tmp_path / "t.npy", "--logits", logits
    with (
        TwoProcesses(tmp_path, "generate", *flags) as generated,
        TwoProcesses(tmp_path / "e", "evaluate", *given) as evaluated,
    ):
        alone = run_generate(out_dir=str(tmp_path / "g"), **texts)
        path = str(tmp_path / "alone.npz")
        run_evaluate(out_dir=str(tmp_path / "x"), logits=path, **scored)
        for ran in (generated, evaluated):
            first, second = ran.summaries()
            assert first == second
            assert first["out_dir"] == str(ran.out_dirs[0])
            assert not ran.out_dirs[1].exists()
        assert alone.keys() == generated.summaries()[0].keys()
    written = [tmp_path / folder / "generations.jsonl" for folder in ("g", "out0")]
    assert written[0].read_bytes() == written[1].read_bytes()
    with np.load(path) as one, np.load(logits) as two:
        np.testing.assert_array_equal(one["logits"], two["logits"])


ASKED = [("The river", 0.0), ("12 sacks", 0.9), ("3 cats", 0.0)]


def alone(tiny: str) -> list[list[NewToken]]:
    """What the rows of ASKED get from one process."""
    loaded = load_engine(tiny)
    with loaded.engine as engine:
        options = ServingOptions(max_batch=2, max_context=64, prefill_chunk=32)
        driver, rows = make_driver(engine, options), []
        for text, temperature in ASKED:
            rows.append([])
            driver.submit(
                Request(
                    prompt=tuple(loaded.tokenizer.encode(text)),
                    new_tokens=20,
                    floor=2,
                    sampling=Sampling(temperature=temperature, seed=5),
                    top_logprobs=1,
                    ends=rows[-1].append,
                )
            )
        while driver.is_busy:
            driver.step()
    return rows


def test_server_of_two_processes_serves_what_one_does_and_drains(tiny, tmp_path):
    """Also while one is late; a signal to either ends both in order."""
    more = "--checkpoint", tiny, "--prompt_cache", "1MiB"
    with TwoProcesses(tmp_path, "serve", *SMALL, *more, has_out_dir=False) as ran:
        rows = alone(tiny)
        first, second = ran.processes
        wait_until(lambda: ran.lines(0) or first.poll() is not None, WAIT_S)
        url = json.loads(ran.lines(0)[0])["url"]

        def complete(**fields) -> dict:
            body = {"max_tokens": 20, "ignore_eos": True} | fields
            status, raw = ask(url, "POST", "/v1/completions", body)
            assert status == 200, raw
            return json.loads(raw)["choices"][0]

        def one(asked) -> dict:
            text, temperature = asked
            rule = {"temperature": temperature, "seed": 5, "logprobs": 1}
            return complete(prompt=text, **rule)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            answers = pool.map(one, ASKED)
            second.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            second.send_signal(signal.SIGCONT)
            for answer, row in zip(answers, rows, strict=True):
                found = answer["logprobs"]["token_logprobs"]
                expected = [new.score.logprob for new in row]
                np.testing.assert_allclose(found, expected, atol=1e-5)
        guided = complete(
            prompt="A", structured_outputs={"regex": "[ab]{6}c"}, ignore_eos=False
        )
        assert guided["text"][6:] == "c" and set(guided["text"][:6]) <= {"a", "b"}
        second.send_signal(signal.SIGTERM)
        summary, same = ran.summaries()
    assert summary == same
    assert summary["outcomes"]["finished"] == summary["requests"] == 4
