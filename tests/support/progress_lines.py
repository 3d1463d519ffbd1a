"""What a process wrote to stderr, without lines that depend on the machine it ran on.

- A process that is silent for more than ten seconds reports its progress, so on a busy
  machine any process may.
- Where JAX's CUDA plugin is installed and no driver, XLA logs that it found none, also
  if JAX_PLATFORMS says `cpu`.
"""

import re

_PROGRESS = r"[^:\n]+:( \d+/\d+,)? \d+ s\n"
_BEFORE_LOGS = r"WARNING: All log messages before absl::InitializeLog\(\).*\n"
_NO_DRIVER = r"I\d{4} [\d:.]+ +\d+ cudart_stub\.cc:\d+\] Could not find cuda .*\n"
_LEFT_OUT = re.compile(f"{_PROGRESS}|{_BEFORE_LOGS}|{_NO_DRIVER}")


def without_progress(stderr: str) -> str:
    """The other lines, as they were written."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not _LEFT_OUT.fullmatch(line))
