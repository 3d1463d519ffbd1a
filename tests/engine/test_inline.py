"""Programs of a CPU run in the caller's thread only where a host plans each layer."""

import subprocess
import sys

import pytest

from tests.support.slot_kinds import on_cpu
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = on_cpu

SCRIPT = """
import sys
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions

checkpoint, modes = sys.argv[1:]
for mode in modes.split(","):
    offload = None if mode == "resident" else OffloadOptions(mode=mode)
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

from moe_edge.core.events import Recorder
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions

prompts = [list(range(3, 40)), list(range(50, 61))]
found, recorder = [], Recorder()
for options in (
    {"device_memory": "25%", "link_bytes_per_s": 1e8},
    {"device_memory": "50%", "predictor": "stale_gate", "link_bytes_per_s": 3e7},
    {"device_memory": "50%", "predictor": "previous"},
    {"device_memory": "50%", "predictor": "smoe_partial", "assist": None},
    {"device_memory": "100%"},
    None,
):
    offload = options and OffloadOptions(**options)
    given = {} if options is None else {"recorder": recorder}
    engine = load_engine(sys.argv[1], with_tokenizer=False, offload=offload, **given)
    engine = engine.engine
    for group in (prompts, prompts[:1]):
        found.append(generate(engine, group, 40).tokens)
    if options is not None and options["device_memory"] == "25%":
        assert engine.manager.statistics.waves[False] > 0
    if options is not None and options.get("predictor") == "stale_gate":
        assert engine.manager.queue.stats().prefetch.count > 5
for n in range(0, len(found), 2):
    assert found[n : n + 2] == found[-2:], n
# A program's time is known to whoever draws it: a call takes 40 us and more, what comes
# after it until the routing is read 15.
spent_s = [event.dur_s for event in recorder.events() if event.kind == "compute"]
print(sorted(spent_s)[len(spent_s) // 2])
"""


@pytest.mark.parametrize(
    "modes, is_inline",
    [
        ("layered", True),
        ("auto,resident", True),
        ("fused", False),
        ("resident,layered", False),  # too late: something has run
    ],
)
def test_programs_run_where_the_first_engine_wants_them(modes, is_inline, tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    assert said(SCRIPT, checkpoint, modes).split()[-1] == str(is_inline)


def test_inline_programs_give_the_resident_tokens(tmp_path):
    spent_s = float(said(TOKENS, write_tiny_checkpoint(tmp_path / "tiny")))
    assert spent_s > 30e-6


def said(script, *arguments) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout
