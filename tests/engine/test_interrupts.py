"""Ctrl-C ends what decodes, also where Python drops it, and leaves a usable engine."""

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.likelihood import Forced, token_log_probs
from moe_edge.evaluate.stepwise import Stepwise, score_forced
from tests.support.interrupts import press_in_collection, python_handler
from tests.support.layered import layered
from tests.support.live_run import WITH_INTERRUPTS
from tests.support.progress_lines import without_progress
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_models import GQA, random_prompts, random_weights

ROOT = Path(__file__).parents[2]
TRIES, LATE_S = 20, 600
KINDS = {"resident": lambda: ResidentEngine(random_weights(GQA)), "layered": layered}


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    with KINDS[request.param]() as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_in_plain_python():
    with python_handler():
        yield


PROMPTS = random_prompts(GQA, (20,))


class Interrupting:
    """An engine in whose third step Ctrl-C comes within a garbage collection."""

    def __init__(self, engine):
        self._engine, self.steps = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def decode(self, *given):
        self.steps += 1
        if self.steps == 3:
            press_in_collection()
        return self._engine.decode(*given)


def test_interrupted_generate_ends_and_the_engine_goes_on(engine):
    before = generate(engine, PROMPTS, 9).tokens
    interrupting, told = Interrupting(engine), []
    with pytest.raises(KeyboardInterrupt):
        generate(interrupting, PROMPTS, 9, on_token=lambda *token: told.append(token))
    assert interrupting.steps == 3
    assert [token for _, token in told] == before[0][: len(told)] and len(told) < 5
    assert generate(engine, PROMPTS, 9).tokens == before


def test_interrupted_prefill_ends_after_its_chunk(engine, monkeypatch):
    monkeypatch.setattr("moe_edge.engine.session.PREFILL_CHUNK", 16)
    before, layers = generate(engine, PROMPTS, 2).tokens, []

    def note(layer, routing) -> None:
        layers.append(layer)
        if len(layers) == 1:
            press_in_collection()

    with pytest.raises(KeyboardInterrupt):
        generate(engine, PROMPTS, 2, on_routing=note)
    assert layers == list(GQA.moe_layers)
    assert generate(engine, PROMPTS, 2).tokens == before


def test_interrupted_evaluation_ends(engine):
    (row,) = PROMPTS
    for run in (
        lambda at: score_forced(at, [Forced(row, 1)]),
        lambda at: token_log_probs(Stepwise(at), [row]),
    ):
        interrupting = Interrupting(engine)
        with pytest.raises(KeyboardInterrupt):
            run(interrupting)
        assert interrupting.steps == 3


GENERATING = """
import sys, time
import numpy as np
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import resolve_offload

loaded = load_engine(sys.argv[1], offload=resolve_offload("50%", None))
generate(loaded.engine, [[1, 2, 3]] * 2, 2)
for number in range(int(sys.argv[2])):
    try:
        print("decoding", flush=True)
        while True:
            generate(loaded.engine, [[1, 2, 3]] * 2, 100)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_interrupts_of_a_plain_process_are_never_lost(tmp_path):
    """No hook of a script is installed here, as in a notebook."""
    checkpoint = write_tiny_checkpoint(tmp_path / "m")
    given = ["-c", GENERATING, str(checkpoint), str(TRIES)]
    rng = random.Random(0)
    with subprocess.Popen(
        [*WITH_INTERRUPTS, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as process:
        late = threading.Timer(LATE_S, process.kill)  # ends a test that waits
        late.start()
        for _ in range(TRIES):
            assert process.stdout.readline() == "decoding\n"
            time.sleep(rng.uniform(0, 0.5))
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
        _, errors = process.communicate()
        late.cancel()
    assert (process.returncode, without_progress(errors)) == (0, "")


@pytest.mark.slow
def test_interrupts_of_generate_always_end_it(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "m", max_position_embeddings=30_000)
    flags = ["--checkpoint", checkpoint, "--prompt", "The mill", "--out_dir", "o"]
    flags += ["--max_new_tokens", 20_000, "--device_memory", "50%"]
    rng = random.Random(0)
    for _ in range(TRIES):
        with subprocess.Popen(
            [*WITH_INTERRUPTS, f"{ROOT}/launch/generate.py", *map(str, flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as process:
            late = threading.Timer(LATE_S, process.kill)
            late.start()
            process.stdout.read(len("The mill") + 9)  # tokens are on their way
            time.sleep(rng.uniform(0, 0.5))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
            late.cancel()
        said = without_progress(errors.decode())
        assert (process.returncode, said) == (130, "interrupted\n")
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
