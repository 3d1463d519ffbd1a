"""Ctrl-C and SIGTERM end a script by an exception that is never lost."""

import os
import signal
import sys
import types

IMPORTING = "<frozen importlib._bootstrap>"  # runs while a module is imported
AGAIN_S = 0.02
_caller = None  # code that called `install`; an import that called it does not count
_kind = None  # exception of a signal that is to come back


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends like Ctrl-C, so half-written folders are removed on the way out."""


def end_at_once(number, frame) -> None:
    """Handler of Ctrl-C while a command is imported: nothing is there to tidy up."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def install_early() -> None:
    """Until `install`: Ctrl-C ends the process at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def install() -> None:
    """From here on the signals raise; one that is ignored stays so.

    The caller calls `end` when it ends.
    """
    global _caller
    _caller = sys._getframe(1).f_code
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) in (end_at_once, signal.default_int_handler):
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = ask_again


def end() -> None:
    """Drops a signal that was to come back later: the script has ended."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def terminate(number, frame) -> None:
    """Handler of SIGTERM."""
    end_by(Terminated, frame)


def interrupt(number, frame) -> None:
    """Handler of SIGINT (Ctrl-C)."""
    end_by(KeyboardInterrupt, frame)


def end_by(kind: type[KeyboardInterrupt], frame: types.FrameType | None) -> None:
    """Raises an exception of this kind, or comes back later: while a module is loaded
    its native part might lose the exception, or crash by it.

    Args:
      frame: what runs now.
    """
    while frame is not None and frame.f_code is not _caller:
        if frame.f_code.co_filename == IMPORTING:
            return come_back(kind)
        frame = frame.f_back
    raise kind


def come_back(kind: type[KeyboardInterrupt]) -> None:
    """Tries `end_by` a little later, and again until that was heard: an alarm that
    comes just before the main thread waits in the system does not wake it."""
    global _kind
    _kind = kind
    signal.signal(signal.SIGALRM, alarmed)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)


def alarmed(number, frame) -> None:
    """Handler of the alarms, of which the first one heard counts."""
    global _kind
    end()
    kind, _kind = _kind, None
    if kind is not None:
        end_by(kind, frame)


def ask_again(dropped) -> None:
    """Python drops an exception raised inside a callback (JAX has one in each garbage
    collection): a SIGTERM or Ctrl-C that ended there comes again a little later."""
    if isinstance(dropped.exc_value, KeyboardInterrupt):
        come_back(type(dropped.exc_value))
    else:
        sys.__unraisablehook__(dropped)
