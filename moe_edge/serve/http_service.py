"""One model over HTTP, whatever its engine: from the sockets to the last answer."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from socket import socket
from typing import Any

from moe_edge.core.progress import waiting
from moe_edge.serve.app import make_app
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.driver import Driver
from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.experts import ExpertWatch
from moe_edge.serve.metrics import Metrics
from moe_edge.serve.options import ServingOptions
from moe_edge.serve.pages import page_routes
from moe_edge.serve.request_log import RequestLog
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.server_options import ServerOptions
from moe_edge.serve.service import Service, run_until_signal, url_of
from moe_edge.serve.watch_routes import watch_routes


def serve_http(
    load: Callable[[], Driver],
    sock: socket,
    model: ServedModel,
    template: ChatTemplate,
    serving: ServingOptions,
    server: ServerOptions,
    on_ready: Callable[[], Any] = lambda: None,
    before_close: Callable[[Driver], Any] = lambda driver: None,
) -> dict[str, Any]:
    """Serves in the main thread until a signal; prints a line of JSON when ready.

    Args:
      load: a driver that is warmed up; called in the engine's thread.
      before_close: called there once no request runs any more.
      on_ready: called after that line.
    Returns:
      requests, outcomes, generated_tokens, uptime_s.
    """
    key, begun_s = server.key(), time.monotonic()
    metrics, experts = Metrics(), ExpertWatch()
    observers = [metrics, experts]
    with contextlib.ExitStack() as stack:
        if server.request_log is not None:
            observers.append(RequestLog(server.request_log))
            stack.callback(observers[-1].close)

        def close(driver: Driver) -> None:
            try:
                before_close(driver)
            finally:
                driver.slots.engine.close()

        thread = EngineThread(load, close, observers)

        def tell_ready() -> None:
            line = {
                "ready": True,
                "url": url_of(sock),
                "model": model.id,
                "k": model.own_k,
                "max_batch": serving.max_batch,
                "max_context": model.max_context,
                "compiled": thread.driver.slots.num_compiled(),
                "seconds": round(time.monotonic() - begun_s, 3),
            }
            on_ready()
            print(json.dumps(line), flush=True)

        print(f"chat template: {template.name}", file=sys.stderr)
        print(
            "loading and compiling; minutes, or less with programs kept in "
            "JAX_COMPILATION_CACHE_DIR",
            file=sys.stderr,
        )
        more = [*page_routes(), *watch_routes(thread, metrics, experts)]
        app = make_app(thread, model, template, server, key, more)
        stack.enter_context(waiting())  # what the engine's thread loads is reported
        run_until_signal(Service(thread, app, server, sock, tell_ready))
        return thread.summary() | {"uptime_s": round(time.monotonic() - begun_s, 3)}
