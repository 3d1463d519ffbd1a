"""One line in place of the stack of C++ with which JAX ends a process.

Where its coordinator is gone, or misses a heartbeat, JAX calls `abort` in a thread of
its own, often before ours has seen it. What C++ writes to stdout and stderr is kept
back meanwhile: it comes at the end, on stderr, or before an abort for another reason.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator

from moe_edge.hosts.link import HostLostError

LINE = (
    b"error: the coordinator or another process is gone, says JAX; start all processes "
    b"again\n"
)
_LOST = b"distributed service detected fatal errors"
# Lines about processes that are gone, in runs that end in order, too.
_NOISE = re.compile(rb"coordination_service|distributed service|^\[Gloo\]")
_MOST_BYTES = 1 << 20


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Inside this context JAX's abort is one line and exit code 3."""
    with tempfile.TemporaryFile() as kept, contextlib.ExitStack() as stack:
        real = stack.enter_context(_python_alone(kept.fileno()))

        def text() -> bytes:
            return os.pread(kept.fileno(), _MOST_BYTES, 0)

        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def aborted(number: int) -> None:
            found = text()
            if _LOST in found:
                os.write(real, LINE)
                os._exit(HostLostError.exit_code)
            os.write(real, found)  # the default action follows

        set_handler = ctypes.CDLL(None).signal
        set_handler.restype = ctypes.c_void_p
        set_handler.argtypes = ctypes.c_int, ctypes.c_void_p
        before = set_handler(signal.SIGABRT, ctypes.cast(aborted, ctypes.c_void_p))
        try:
            yield
        finally:
            set_handler(signal.SIGABRT, before)
            lines = [x for x in text().splitlines(True) if not _NOISE.search(x)]
            os.write(real, b"".join(lines))


@contextlib.contextmanager
def _python_alone(kept: int) -> Iterator[int]:
    """Only Python's own streams are shown; all else goes into a file.

    Args:
      kept: descriptor of that file.
    Yields:
      A descriptor of what stderr was.
    """
    before = sys.stdout, sys.stderr, sys.__stderr__
    sys.stdout.flush()
    real = [os.dup(1), os.dup(2)]
    streams = [os.fdopen(fd, "w", 1, errors="replace", closefd=False) for fd in real]
    for number in (1, 2):
        os.dup2(kept, number)
    sys.stdout, sys.stderr = streams
    sys.__stderr__ = sys.stderr
    try:
        yield real[1]
    finally:
        sys.stdout, sys.stderr, sys.__stderr__ = before
        for number, (fd, stream) in enumerate(zip(real, streams, strict=True), 1):
            stream.close()
            os.dup2(fd, number)
            os.close(fd)
