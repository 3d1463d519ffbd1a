"""Programs of a CPU run in the caller's thread only where a host plans each layer."""

import subprocess
import sys

import pytest

from tests.support.slot_kinds import on_cpu
from tests.support.slow_cases import slow
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = on_cpu

SCRIPT = """
import sys
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.load import check_checkpoint, load_engine, prepare_process
from moe_edge.engine.offload_options import OffloadOptions

checkpoint, modes = sys.argv[1:]
for mode in modes.split(","):
    if mode == "resident":
        offload = None
    elif mode == "shadow":
        offload = OffloadOptions(predictor="shadow")
    else:
        offload = OffloadOptions(mode=mode)
    # As servers do before the check, which asks JAX.
    prepare_process(open_checkpoint(checkpoint), offload)
    check_checkpoint(checkpoint, with_tokenizer=False, offload=offload)
    load_engine(checkpoint, with_tokenizer=False, offload=offload)

import jax
import jax.numpy as jnp

x = jnp.ones((1200, 1200))
program = jax.jit(lambda x: x @ x @ x).lower(x).compile()
# It takes some 30 ms; who dispatches may be held up for as long, but not each time.
print(all(program(x).is_ready() for _ in range(5)))
"""

# A resident engine that comes later says what is right.
TOKENS = """
import sys

import time

from moe_edge.core.events import Recorder
from moe_edge.engine.generate import generate
from moe_edge.engine.inline import is_inline
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions

prompts = [list(range(3, 40)), list(range(50, 61))]
found = []
for options in (
    {"device_memory": "25%", "link_bytes_per_s": 1e8},
    {"device_memory": "50%", "predictor": "stale_gate", "link_bytes_per_s": 3e7},
    {"device_memory": "50%", "predictor": "previous"},
    {"device_memory": "50%", "predictor": "smoe_partial", "assist": None},
    {"device_memory": "100%"},
    None,
):
    offload = options and OffloadOptions(**options)
    engine = load_engine(sys.argv[1], with_tokenizer=False, offload=offload).engine
    for group in (prompts, prompts[:1]):
        found.append(generate(engine, group, 40).tokens)
    if options is not None and options["device_memory"] == "25%":
        assert engine.layer_step.statistics.waves[False] > 0
    if options is not None and options.get("predictor") == "stale_gate":
        assert engine.queue.stats().prefetch.count > 5
assert is_inline()
for n in range(0, len(found), 2):
    assert found[n : n + 2] == found[-2:], n

# What a program takes is in its event.
def slowly(*given):
    time.sleep(5e-3)
    return advance(*given)


recorder = Recorder()
engine = load_engine(
    sys.argv[1], with_tokenizer=False, offload=OffloadOptions(), recorder=recorder
).engine
advance, engine.programs.advance = engine.programs.advance, slowly
generate(engine, prompts, 4)
spent_s = [event.dur_s for event in recorder.events() if event.kind == "compute"]
assert sum(each >= 5e-3 for each in spent_s) >= len(spent_s) // 2 > 2, spent_s
"""


@pytest.mark.parametrize(
    "modes, is_inline",
    [
        ("auto,resident", True),
        *slow(("layered", True), ("fused", False), ("shadow", False)),
        *slow(("resident,layered", False)),  # too late: something has run
    ],
)
def test_programs_run_where_the_first_engine_wants_them(modes, is_inline, tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    assert said(SCRIPT, checkpoint, modes).split()[-1] == str(is_inline)


@pytest.mark.slow
def test_inline_programs_give_the_resident_tokens(tmp_path):
    said(TOKENS, write_tiny_checkpoint(tmp_path / "tiny"))


def said(script, *arguments) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout
