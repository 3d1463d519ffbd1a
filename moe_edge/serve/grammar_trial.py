"""Whether a grammar compiles within bounds, tried in a process of its own.

llguidance bounds most of its work. But parts of a JSON schema that must hold at once,
such as a large `multipleOf` or two patterns, take it hours and all memory, and a long
chain of references more stack than a thread has, which ends the process.
"""

import functools
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import llguidance

LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 7 ms of a step
    "step_max_items": 20_000,  # about 1 ms of a step
    "max_lexer_states": 50_000,  # about 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # what a client sent is not repeated to it
}
_MOST_CPU_S = 2  # of the whole process
_MOST_BYTES = 2 << 30
_STACK_BYTES = 2 << 20  # a quarter of what the server's threads have
_MOST_S = 60  # where other processes take the cores


class Trial(NamedTuple):
    """What compiling a grammar once has shown.

    Attributes:
      fault: why llguidance cannot compile it, in one line; None if it can.
      num_bytes: that the compiled grammar takes; 0 where that is not known.
    """

    fault: str | None
    num_bytes: int = 0


@functools.lru_cache(maxsize=64)
def try_grammar(grammar: str) -> Trial:
    """Compiles a grammar in a process of its own.

    Takes a fifth of a second, or no time for one of the last grammars.

    Args:
      grammar: in llguidance's own form.
    """
    command = [sys.executable, "-P", __file__]
    given = grammar.encode()
    try:
        tried = subprocess.run(
            command, input=given, capture_output=True, timeout=_MOST_S
        )
    except subprocess.TimeoutExpired:
        return Trial(f"it is not compiled after {_MOST_S} s")
    if tried.returncode < 0 or not tried.stdout:  # by a signal, or its thread failed
        return Trial(
            "it nests too deeply, or compiling it takes too much time or memory"
        )
    tried.check_returncode()
    size, _, fault = tried.stdout.decode().partition("\n")
    return Trial(fault or None, int(size))


def first_fault(matcher: llguidance.LLMatcher) -> str | None:
    """What is wrong with a grammar as far as a matcher knows, in one line."""
    if not matcher.is_error():
        return None
    first, *others = f"{matcher.get_error()}\n".splitlines()
    # Of a pattern the first line says where, a later one why.
    why = next((line for line in others if line.startswith("error: ")), "")
    return f"{first[:300]} {why.removeprefix('error: ')[:100]}".rstrip()


def _try() -> None:
    """Reads a grammar, writes its size and fault; killed beyond the bounds."""
    os.nice(10)  # the engine goes first
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    grammar, tokens = sys.stdin.buffer.read().decode(), llguidance.LLTokenizer("byte")
    llguidance.LLMatcher(tokens, "start: /a/").compute_bitmask()  # loads the code
    before = _resident_bytes()
    matcher = llguidance.LLMatcher(
        tokens,
        grammar,
        log_level=0,
        limits=llguidance.LLParserLimits(**LIMITS),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is the slowest
    size = max(_resident_bytes() - before, 0)
    sys.stdout.buffer.write(f"{size}\n{first_fault(matcher) or ''}".encode())


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_try).start()
