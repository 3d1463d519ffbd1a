"""Options of the server alone: where it listens, who may ask, how long it waits."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_positive,
)
from moe_edge.core.files import check_there
from moe_edge.offload.slot_plan import parse_budget
from moe_edge.serve.api_key import read_key
from moe_edge.serve.guards import check_public


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server meets its clients.

    Attributes:
      host: address to listen on; any other than this machine's own needs a key.
      port: 0: any free one.
      api_key_file: holds the key of all requests; or set MOE_EDGE_API_KEY.
      max_body: of a request.
      receive_s: in which a request must be whole.
      idle_client_s: in which a client must take something of its answer.
      request_s: most that a request may take.
      drain_s: what requests have left once the server is told to end.
      allowed_host: a further name that requests may call this server.
      cors_origin: of web pages that may read answers; none may by default.
      chat_template: file, instead of the checkpoint's own.
      request_log: file that gets a line of each request, without its text.
      fail_step: a drill: the step of this number raises.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    max_body: str = "1MiB"
    receive_s: float = 15.0
    idle_client_s: float = 30.0
    request_s: float = 600.0
    drain_s: float = 30.0
    allowed_host: Sequence[str] = ()
    cors_origin: Sequence[str] = ()
    chat_template: str | None = None
    request_log: str | None = None
    fail_step: int | None = None

    def __post_init__(self):
        """Raises ConfigError for what no server could honour."""
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port}, expected 0 to 65535 (0: any)")
        try:
            most = parse_budget(self.max_body).bytes
        except ConfigError:  # in the words of another flag
            most = None
        if not most:
            raise ConfigError(f"max_body {self.max_body!r} must be such as 1MiB")
        for name in ("receive_s", "idle_client_s", "request_s"):
            check_positive(name, getattr(self, name))
        check_from_zero("drain_s", self.drain_s)
        if self.fail_step is not None:
            check_count("fail_step", self.fail_step)
        for flag in ("api_key_file", "chat_template"):
            if getattr(self, flag) is not None:
                check_there(getattr(self, flag), f"--{flag}")
        log = self.request_log
        if log is not None and not Path(log).absolute().parent.is_dir():
            raise ConfigError(f"--request_log {log}: there is no such folder")
        if log is not None and Path(log).is_dir():
            raise ConfigError(f"--request_log {log} is a folder; name a file in it")
        check_public(self.host, self.key())

    def key(self) -> bytes | None:
        """What requests must bring; None: nothing."""
        return read_key(self.api_key_file)

    @property
    def max_body_bytes(self) -> int:
        return parse_budget(self.max_body).bytes
