"""The routes of the server, and what stands around them."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers as RequestHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from moe_edge.serve.chat_body import read_chat
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.completion_body import read_completion
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.errors import ApiError
from moe_edge.serve.generation import Generation, Workers
from moe_edge.serve.guards import (
    ClientGone,
    Headers,
    HostGuard,
    KeyGuard,
    Reported,
    error_response,
    read_body,
)
from moe_edge.serve.responses_body import read_responses
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.server_options import ServerOptions
from moe_edge.serve.tokenizer_routes import detokenize, tokenize, tokenizer_info

MOST_BODIES = 16  # of the largest size, that are read or wait for it


def make_app(
    thread: EngineThread,
    model: ServedModel,
    template: ChatTemplate,
    options: ServerOptions,
    key: bytes | None,
    more: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The server as an ASGI application.

    Args:
      more: further routes.
    """
    limit = options.max_body_bytes
    most_bytes = MOST_BODIES * limit
    readers, writers = Workers("bodies", 2, most_bytes), Workers("answers", 2)
    tokenizing = Workers("tokenize", 1, most_bytes)  # holds up no request for text
    compilers = Workers("grammars", 2, most_bytes)  # seconds, of hostile ones

    def generation(read) -> Generation:
        given = readers, writers, compilers, limit, options.request_s
        return Generation(thread, model, template, read, *given)

    def from_body(answer: Callable[..., Any], *given):
        async def reply(request: Request) -> Response:
            body = await read_body(request.scope, request.receive, limit)
            found = await tokenizing.read(request.receive, answer, body, *given)
            return JSONResponse(found)

        return reply

    async def models(request: Request) -> Response:
        return JSONResponse(model.listing())

    async def one_model(request: Request) -> Response:
        model.check_id("model", request.path_params["id"])
        return JSONResponse(model.entry())

    async def info(request: Request) -> Response:
        return JSONResponse(tokenizer_info(model, template))

    async def health(request: Request) -> Response:
        if thread.state != "ok":
            return JSONResponse({"status": thread.state}, 503)
        counts = {"running": thread.num_running, "waiting": thread.num_waiting}
        return JSONResponse({"status": "ok"} | counts)

    def post(path: str, endpoint) -> Route:
        return Route(path, endpoint, methods=["POST"])

    app: ASGIApp = Starlette(
        routes=[
            post("/v1/completions", generation(read_completion)),
            post("/v1/chat/completions", generation(read_chat)),
            post("/v1/responses", generation(read_responses)),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", one_model),
            post("/tokenize", from_body(tokenize, model, template)),
            post("/detokenize", from_body(detokenize, model)),
            Route("/tokenizer_info", info),
            Route("/health", health),
            *more,
        ],
        exception_handlers={
            ApiError: lambda request, error: error_response(error),
            HTTPException: _http_error,
            ClientGone: lambda request, error: Response(),
            Exception: lambda request, error: error_response(_FAULT),
        },
    )
    app.router.redirect_slashes = False
    if key is not None:
        app = KeyGuard(app, key)
    if options.cors_origin:
        app = _Cors(
            app,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients have many of their own
        )
    return Reported(Headers(HostGuard(app, options.host, options.allowed_host)))


_FAULT = ApiError("engine_error", "the server failed at this request")


def _http_error(request: Request, error: HTTPException) -> Response:
    """Where there is no such route, or not for this method."""
    path = request.url.path[:100]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        found = ApiError(
            "method_not_allowed",
            f"{request.method} {path} is not supported, expected {allowed}",
            headers={"Allow": allowed},
        )
    else:
        found = ApiError("not_found", f"there is no {path} here")
    return error_response(found)


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: RequestHeaders) -> Response:
        """As starlette's, a refusal in OpenAI's shape."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refused = response.body.decode()  # "Disallowed CORS origin, ..."
        error = ApiError(
            "invalid_value", f"{refused}; start the server with --cors_origin"
        )
        return error_response(error)
