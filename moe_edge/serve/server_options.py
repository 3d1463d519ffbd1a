"""Options of the server alone: where it listens, who may ask, how long it waits."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.core.files import check_there
from moe_edge.offload.budget import parse_budget
from moe_edge.serve.api_key import read_key
from moe_edge.serve.guards import check_public
from moe_edge.serve.tools.dialects import DIALECTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server meets its clients.

    Attributes:
      host: address to listen on; any but a local one needs a key.
      port: port to listen on; 0: any free one.
      api_key_file: file with the key that every request must bring; or set
        MOE_EDGE_API_KEY.
      max_body: most bytes of a request's body.
      receive_s: time limit for receiving a request.
      idle_client_s: a client that accepts no data for so long is disconnected.
      request_s: time limit of a request, from arrival to the last token.
      drain_s: how long running requests may finish after SIGTERM.
      allowed_host: another host name that requests may use; repeatable.
      cors_origin: origin of web pages that may read answers; repeatable; default: none.
      chat_template: Jinja file that replaces the checkpoint's own template.
      tool_parser: how the model writes calls of tools (docs/serving.md); auto: as its
        chat template says.
      prompt_cache_dir: folder that keeps the prompt cache from one start to the next.
      request_log: file that gets one line a request, without its text.
      fail_step: fault injection: the step of this number raises an error.
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
    tool_parser: str = "auto"
    prompt_cache_dir: str | None = None
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
        check_known("tool parser", self.tool_parser, ("auto", *DIALECTS))
        kept = self.prompt_cache_dir
        if kept is not None and Path(kept).exists() and not Path(kept).is_dir():
            raise ConfigError(f"--prompt_cache_dir {kept} is no folder; name one")
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
