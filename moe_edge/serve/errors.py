"""What the server refuses or fails at, in OpenAI's shape."""

import sys
import traceback
from collections.abc import Mapping
from typing import Any

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_RETRY = {"Retry-After": "1"}

# Code -> (HTTP status, OpenAI's type, headers that always go with it).
CODES: dict[str, tuple[int, str, Mapping[str, str]]] = {
    "invalid_json": (400, _INVALID, {}),
    "invalid_value": (400, _INVALID, {}),
    "unknown_parameter": (400, _INVALID, {}),
    "unsupported_parameter": (400, _INVALID, {}),
    "context_length_exceeded": (400, _INVALID, {}),
    "quality_unmeasured": (400, _INVALID, {}),
    "invalid_api_key": (401, "authentication_error", {"WWW-Authenticate": "Bearer"}),
    "host_not_allowed": (403, "permission_error", {}),
    "not_found": (404, _INVALID, {}),
    "model_not_found": (404, _INVALID, {}),
    "method_not_allowed": (405, _INVALID, {}),
    "receive_timeout": (408, _INVALID, {}),
    "body_too_large": (413, _INVALID, {}),
    "json_required": (415, _INVALID, {}),
    "queue_full": (429, "rate_limit_error", _RETRY),
    "engine_error": (500, _SERVER, {}),
    "loading": (503, _SERVER, _RETRY),
    "draining": (503, _SERVER, _RETRY),
    "engine_failed": (503, _SERVER, _RETRY),
    # A client that tries again by itself would be late again.
    "deadline_exceeded": (504, "timeout_error", {"x-should-retry": "false"}),
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
      code: of `CODES`, which gives the status and the type.
      message: one line; what, got, expected, what to do.
      param: the field that is at fault.
      headers: in place of those of the code, or more.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.type, always = CODES[code]
        self.code, self.message, self.param = code, message, param
        self.headers = {**always, **(headers or {})}

    def body(self) -> dict[str, Any]:
        """What is sent, as JSON or as one `data:` line of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_value(param: str, message: str) -> ApiError:
    """Of a field that cannot be as it is, or beside others."""
    return ApiError("invalid_value", message, param=param)


_REASONS = {
    "loading": "the model is being loaded; try again",
    "draining": "the server is about to end; ask another one",
    "engine_failed": "the engine failed and the server is about to end",
    "engine_error": "a step of the engine failed; the request may be sent again",
    "queue_full": "too many requests are waiting; try again later",
    "deadline_exceeded": "the request's time was over before it began",
}


def refusal(code: str) -> ApiError:
    """Why a request was not taken on, or not carried through."""
    return ApiError(code, _REASONS[code])


def shown(value: Any) -> str:
    """A value of a request as an error quotes it: short, and always whole UTF-8."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def report(error: BaseException) -> None:
    """Says on stderr where an error came from, not its words: they may quote a text."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in frames[:-4:-1])
    print(f"{type(error).__name__} in {where}", file=sys.stderr, flush=True)
