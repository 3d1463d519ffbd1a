"""One line in place of the stack of C++ with which JAX ends a process.

Where its coordinator is gone, or misses a heartbeat, JAX calls `abort` in a thread of
its own, often before ours has seen it. What C++ writes is kept back meanwhile: it comes
at the end, or before an abort for another reason.
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
_NOISE = re.compile(rb"coordination_service|preemption_sync|distributed service")
_MOST_BYTES = 1 << 20


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Inside this context JAX's abort is one line and exit code 3."""
    stderr = sys.stderr
    real = os.dup(2)
    with tempfile.TemporaryFile() as kept, os.fdopen(os.dup(2), "w", 1) as ours:

        def text() -> bytes:
            return os.pread(kept.fileno(), _MOST_BYTES, 0)

        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def aborted(number: int) -> None:
            found = text()
            if _LOST in found:
                os.write(real, LINE)
                os._exit(HostLostError.exit_code)
            os.write(real, found)
            os.dup2(real, 2)  # the default action follows

        os.dup2(kept.fileno(), 2)
        ours.reconfigure(errors="replace")
        sys.stderr = sys.__stderr__ = ours
        set_handler = ctypes.CDLL(None).signal
        set_handler.restype = ctypes.c_void_p
        set_handler.argtypes = ctypes.c_int, ctypes.c_void_p
        before = set_handler(signal.SIGABRT, ctypes.cast(aborted, ctypes.c_void_p))
        try:
            yield
        finally:
            set_handler(signal.SIGABRT, before)
            sys.stderr = sys.__stderr__ = stderr
            os.dup2(real, 2)
            os.close(real)
            lines = [x for x in text().splitlines(True) if not _NOISE.search(x)]
            os.write(2, b"".join(lines))
