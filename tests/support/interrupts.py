"""Ctrl-C at the moments at which Python loses it."""

import contextlib
import gc
import signal
from collections.abc import Iterator


def press() -> None:
    """Ctrl-C, and the moment at which Python calls its handler."""
    signal.raise_signal(signal.SIGINT)


def press_in_collection() -> None:
    """Ctrl-C within a callback of the garbage collector, where Python drops errors."""

    def callback(phase, info) -> None:
        gc.callbacks.remove(callback)
        press()

    gc.callbacks.append(callback)
    gc.collect(0)


@contextlib.contextmanager
def python_handler() -> Iterator[None]:
    """Within, Ctrl-C is handled as in a plain Python process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
