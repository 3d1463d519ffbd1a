"""The root of launch/serve.py: a model behind an OpenAI-compatible server."""

import contextlib
import json
import sys
import time
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.run_folder import unpacked
from moe_edge.engine.load import check_checkpoint
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.model.sub_experts import at_k
from moe_edge.schedule.loop import NO_LIMITS
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.options import ServingOptions, make_loop
from moe_edge.serve.served_model import make_served_model
from moe_edge.serve.server_options import ServerOptions


@unpacked(serving=ServingOptions, server=ServerOptions)
def run_serve(
    *,
    checkpoint: str = "default",
    k: int | None = None,
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    serving: ServingOptions,
    server: ServerOptions,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Serves a model to clients of OpenAI's API until it is told to end.

    Prints a line of JSON when it is ready: ready, url, model, k, max_batch,
    max_context, compiled (programs), seconds.

    Args:
      checkpoint: path or `default`.
      k: experts a token computes at most, in a refactored model sub-experts (None: its
        own).
      device_memory: budget for experts (`25%`, `2GiB`); None: as `offload` says, or
        all resident.
      offload: policies of experts that do not fit.
      dry_run: check what can be checked without weights, then stop.
    Returns:
      requests, outcomes, generated_tokens, uptime_s.
    Raises:
      MoeEdgeError: bad input, or an engine that fails again and again (exit code 1).
    """
    offload = resolve_offload(device_memory, offload)
    check_checkpoint(checkpoint, offload=offload, k=k)
    reader = open_checkpoint(checkpoint)
    reader.config = at_k(reader.config, k)
    config = reader.config
    if not config.moe_layers:
        raise ConfigError(f"{checkpoint} is a dense model, without experts to serve")
    serving.check_model(config.moe.top_k, config.max_positions)
    model = make_served_model(
        str(checkpoint),
        reader,
        max_context=serving.context(config.max_positions),
        default_floor=serving.default_min_k,
        lossless=offload is None or offload.lossless,
    )
    make_loop(serving, model.own_k, NO_LIMITS, serving.step_costs())
    template = find_template(model.tokenizer.folder, server.chat_template)
    key = server.key()
    from moe_edge.serve.service import Service, listen, run_until_signal, url_of

    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(server.host, server.port))
        if dry_run:
            return {"dry_run": True}
        from moe_edge.serve.app import make_app
        from moe_edge.serve.engine_thread import EngineThread
        from moe_edge.serve.experts import ExpertWatch
        from moe_edge.serve.loading import load_driver
        from moe_edge.serve.metrics import Metrics
        from moe_edge.serve.pages import page_routes
        from moe_edge.serve.request_log import RequestLog
        from moe_edge.serve.watch_routes import watch_routes

        metrics, experts = Metrics(), ExpertWatch()
        observers = [metrics, experts]
        if server.request_log is not None:
            observers.append(RequestLog(server.request_log))
            stack.callback(observers[-1].close)
        begun_s = time.monotonic()
        thread = EngineThread(
            lambda: load_driver(
                checkpoint, k, offload, serving, fail_step=server.fail_step
            ),
            lambda driver: driver.slots.engine.close(),
            observers,
        )

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
            print(json.dumps(line), flush=True)

        print(f"chat template: {template.name}", file=sys.stderr)
        print(
            "loading and compiling; minutes, or less with programs kept in "
            "JAX_COMPILATION_CACHE_DIR",
            file=sys.stderr,
        )
        more = [*page_routes(), *watch_routes(thread, metrics, experts)]
        app = make_app(thread, model, template, server, key, more)
        run_until_signal(Service(thread, app, server, sock, tell_ready))
        return thread.summary() | {"uptime_s": round(time.monotonic() - begun_s, 3)}
