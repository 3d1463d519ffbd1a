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


@functools.lru_cache(maxsize=64)
def fault_of(grammar: str) -> str | None:
    """Why llguidance cannot compile a grammar, in one line; None if it can.

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
        return f"it is not compiled after {_MOST_S} s"
    if tried.returncode < 0:  # by a signal
        return "it nests too deeply, or compiling it takes too much time or memory"
    tried.check_returncode()
    return tried.stdout.decode() or None


def first_fault(matcher: llguidance.LLMatcher) -> str | None:
    """What is wrong with a grammar as far as a matcher knows, in one line."""
    if not matcher.is_error():
        return None
    return f"{matcher.get_error()}\n".splitlines()[0][:300]


def _try() -> None:
    """Reads a grammar and writes what is wrong with it; killed beyond the bounds."""
    os.nice(10)  # the engine goes first
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    grammar = sys.stdin.buffer.read().decode()
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"),
        grammar,
        log_level=0,
        limits=llguidance.LLParserLimits(**LIMITS),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is the slowest
    sys.stdout.buffer.write((first_fault(matcher) or "").encode())


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_try).start()
