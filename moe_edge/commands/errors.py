"""Errors of the user: one line on stderr, an exit code, and no traceback."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

from absl import flags

from moe_edge.commands import gin_files
from moe_edge.commands.gin_data import GIN_ERRORS
from moe_edge.core.checks import ConfigError, MoeEdgeError

DEBUG = flags.DEFINE_bool("debug", False, "show the traceback of an error")
# User errors: what a person can mend without reading our code.
USER_ERRORS = (MoeEdgeError, OSError, MemoryError, flags.Error)
BAD_INPUT = 2


@contextlib.contextmanager
def gin_errors() -> Iterator[None]:
    """gin raises many types for a bad file or binding: all are user errors."""
    try:
        yield
    except USER_ERRORS:
        raise
    except GIN_ERRORS as error:
        raise ConfigError(f"gin: {error}") from error


def report(error: BaseException) -> int:
    """Prints one line (or the traceback, with --debug); returns the exit code."""
    if DEBUG.value or os.environ.get("MOE_EDGE_DEBUG"):
        traceback.print_exception(error)
    else:
        print(f"error: {gin_place(error)}{one_line(error)}", file=sys.stderr)
    return getattr(error, "exit_code", BAD_INPUT)


def gin_place(error: BaseException) -> str:
    """Which line of a gin file gave the value that is refused, if one did."""
    if not isinstance(error, ConfigError):
        return ""
    with contextlib.suppress(OSError):  # a file that is gone by now
        return gin_files.place_of(str(error), flags.FLAGS["gin_file"].value)
    return ""


def one_line(error: BaseException) -> str:
    """The message without what gin appends and without line breaks.

    Python's own message of a file, `[Errno 21] Is a directory: 'x'`, starts with the
    file instead.
    """
    text = str(error).split("\n  In call to configurable")[0]
    if found := re.fullmatch(r"\[Errno \d+\] (.+?): '([^']+)'", text):
        text = f"{found[2]}: {found[1].lower()}; check the path"
    if isinstance(error, MemoryError):
        text = f"not enough memory for what was asked; ask for less ({text})"
    return " ".join(text.split()) or type(error).__name__
