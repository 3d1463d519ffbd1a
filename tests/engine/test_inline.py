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
print(program(x).is_ready())  # it takes some 30 ms
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
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), modes]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == str(is_inline)
