"""What a process wrote to stderr, without the lines that say how far it is.

One that is silent for more than ten seconds writes them, so on a busy machine any may.
"""

import re

_LINE = re.compile(r"[^:\n]+:( \d+/\d+,)? \d+ s\n")


def without_progress(stderr: str) -> str:
    return "".join(
        line for line in stderr.splitlines(keepends=True) if not _LINE.fullmatch(line)
    )
