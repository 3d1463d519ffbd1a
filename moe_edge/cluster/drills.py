"""Failures on purpose: `kill:1@40` kills server 1 after 40 generated tokens, and with
`accuse:1@40` it then says of all other servers that they hang."""

import dataclasses
import re
import signal
from collections.abc import Mapping

from moe_edge.core.checks import ConfigError, check_known

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
PAUSE, PAUSE_S = "pause", 3.0  # then it goes on
ACCUSE = "accuse"  # it says that all others hang
KINDS = (*SIGNALS, ACCUSE)
CAN = {"stop": "be stopped", PAUSE: "be paused", ACCUSE: "accuse others"}


@dataclasses.dataclass(frozen=True)
class Drill:
    """A failure made on purpose, after so many generated tokens.

    Attributes:
      kind: one of KINDS.
      server: whom it strikes, or who accuses, process 1 + server; None: the scheduler.
    """

    kind: str
    server: int | None
    tokens: int


def parse_drill(text: str, known: Mapping[str, int | None]) -> Drill:
    """`kill:1@40` -> Drill; `known`: servers by the names that it may strike.

    Raises:
      ConfigError: another form, kind or name.
    """
    match = re.fullmatch(r"(\w+):(\w+)@(\d+)", text)
    if match is None:
        raise ConfigError(
            f"--drill is {text!r}, expected KIND:WHO@TOKENS such as kill:1@40"
        )
    kind, who, tokens = match.groups()
    check_known("drill", kind, KINDS)
    check_known("process in --drill", who, known)
    if kind != "kill" and known[who] is None:
        raise ConfigError(f"--drill {kind}:scheduler: only servers can {CAN[kind]}")
    return Drill(kind, known[who], int(tokens))
