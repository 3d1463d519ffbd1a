"""Ctrl-C during a loop of steps: it ends the loop between two steps and is never lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of
the garbage collector (JAX registers one), a destructor or a weakref callback Python can
only print it and goes on: the interrupt is lost. In the middle of a step it would leave
an engine with transfers half done.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

_former = None  # SIGINT's handler outside of `held_interrupts`; None: nothing is held
_noted = False  # whether a signal came that was not handed on


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Within, Ctrl-C waits for the next `check_interrupt`, or for the end.

    A second Ctrl-C does not wait. In other threads than the main one, where signals do
    not arrive, and inside of itself it does nothing. Also a decorator.
    """
    global _former
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if _former is not None or not in_main or not callable(handler):
        yield
        return
    _former = handler = signal.default_int_handler if handler is _note else handler
    try:
        signal.signal(signal.SIGINT, _note)
        yield
    finally:
        _former = None
        if signal.getsignal(signal.SIGINT) is _note:
            signal.signal(signal.SIGINT, handler)
        _hand_on(handler)


def check_interrupt() -> None:
    """Between two steps: if Ctrl-C came, does what it did before it was held.

    Raises:
      KeyboardInterrupt: that is what Python's own handler does.
    """
    if _noted and threading.current_thread() is threading.main_thread():
        _hand_on(_former)


def _note(number, frame) -> None:
    global _noted
    again, _noted = _noted, True
    if again or _former is None:
        _hand_on(_former or signal.default_int_handler)


def _hand_on(handler) -> None:
    global _noted
    came, _noted = _noted, False
    if came:
        handler(signal.SIGINT, sys._getframe())
