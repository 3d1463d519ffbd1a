"""An abort of C++ in a process of several: one line if others are gone."""

import os
import signal
import subprocess
import sys

import pytest

from moe_edge.hosts.abort import LINE
from tests.support.live_run import ROOT

LOST = "F1 client.h:80] the JAX distributed service detected fatal errors. More\nstack"
CODE = """
import os, sys, threading
from moe_edge.hosts.abort import one_line
with one_line():
    print("said")
    print("told", file=sys.stderr)
    os.write(1, b"[Gloo] Rank 0 is connected\\n")
    os.write(2, sys.argv[1].encode())
    if sys.argv[2] == "abort":
        threading.Thread(target=os.abort).start()
        threading.Event().wait(60)
print("after")
os.write(2, b"after\\n")
"""


def run(text: str, end: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, text, end],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_abort_is_one_line_where_others_are_gone_and_itself_otherwise():
    assert run(LOST, "abort") == (3, "said\n", "told\n" + LINE.decode())
    code, out, err = run("another reason\n", "abort")
    assert (code, out) == (-signal.SIGABRT, "said\n")
    assert err.startswith("told\n[Gloo] Rank 0 is connected\nanother reason\n")


@pytest.mark.slow
def test_what_was_kept_back_is_said_at_the_end_but_for_lines_of_a_start():
    text = "W1 coordination_service.cc] a task is gone\nof use\n"
    assert run(text, "end") == (0, "said\nafter\n", "told\nof use\nafter\n")
