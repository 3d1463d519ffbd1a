"""The root of `moe-edge serve`: a model behind an OpenAI-compatible server."""

import inspect
from collections.abc import Mapping
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.run_folder import unpacked
from moe_edge.engine.devices import DeviceOptions
from moe_edge.engine.load import check_checkpoint, check_weights, prepare_process
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.hosts.run import across_hosts, current_link
from moe_edge.model.sub_experts import at_k
from moe_edge.route.base import get_route
from moe_edge.schedule.loop import NO_LIMITS
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.options import ServingOptions, make_loop
from moe_edge.serve.served_model import make_served_model
from moe_edge.serve.server_options import ServerOptions


# Process 0 alone meets clients.
@across_hosts(*inspect.signature(ServerOptions).parameters)
@unpacked(shared=DeviceOptions, serving=ServingOptions, server=ServerOptions)
def run_serve(
    *,
    checkpoint: str = "default",
    k: int | None = None,
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    shared: DeviceOptions,
    servers: int | None = None,
    slots: str | None = None,
    route: str = "topk",
    route_options: Mapping[str, Any] | None = None,
    serving: ServingOptions,
    server: ServerOptions,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Serves a model to clients of OpenAI's API until it is told to end.

    Prints a line of JSON when it is ready: ready, url, model, k, max_batch,
    max_context, compiled (programs), seconds.

    Args:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      k: experts a token computes at most, in a refactored model sub-experts (None: its
        own).
      device_memory: a share of the experts' bytes (`25%`), or a size (`2GiB`) that also
        holds the dense weights, the KV cache and staging; `auto`: nine tenths of what
        the device has free, on a CPU with options of a short plan (moe-edge plan);
        None: as `offload` says, or all resident.
      offload: policies of experts that do not fit.
      servers: processes that hold the experts together (Prism); the first one answers
        clients. None: one process.
      slots: with `servers`, experts that each may hold, separated by commas; None: 1.3
        copies of the model, shared equally. One slot of each stays free.
      route: with `servers`, what a decode step computes, by name: with a lossy one
        (substitute, prefer, drop) an expert of another server may give way to one of
        the first. Of one process: `offload.route` in a gin file.
      route_options: of the route.
      dry_run: check what can be checked without weights, then stop.
    Returns:
      requests, outcomes, generated_tokens, uptime_s.
    Raises:
      MoeEdgeError: bad input, or an engine that fails again and again (exit code 1).
    """
    offload, devices = resolve_offload(device_memory, offload), shared.devices
    if servers is None and slots is not None:
        raise ConfigError(f"--slots {slots} are of servers; give --servers with them")
    if servers is None and (route != "topk" or route_options):
        raise ConfigError(
            f"--route {route} is of servers; give --servers with it, or offload.route "
            "in a gin file with --device_memory"
        )
    if servers is not None and devices not in (None, 1):
        raise ConfigError(
            f"--devices {devices} with --servers {servers}: a server of several runs "
            "on one device; leave one of them out"
        )
    link = current_link()
    if link is not None and (servers or server.prompt_cache_dir):
        wrong = "--servers" if servers else "--prompt_cache_dir"
        raise ConfigError(
            f"{wrong} with --num_processes {link.count}: processes that serve one "
            "model together have neither; leave it out"
        )
    if servers is not None and serving.activations != "float32":
        raise ConfigError(
            f"--servers compute with exact activations, got {serving.activations}; "
            "leave --activations out"
        )
    if servers is not None and serving.weights != "copied":
        raise ConfigError(
            f"--servers copy the experts that they hold, got weights {serving.weights};"
            " leave --weights out"
        )
    if servers is not None and offload is not None:
        raise ConfigError(
            "--servers share the experts by --slots; give no --device_memory and no "
            "policies of offloading with them"
        )
    check_checkpoint(checkpoint, k=k)
    reader = open_checkpoint(checkpoint)
    prepare_process(reader, offload)
    reader.config = at_k(reader.config, k).with_cache(serving.kv_cache)
    config = reader.config
    shared.check(reader, offload)
    if not config.moe_layers:
        raise ConfigError(f"{checkpoint} is a dense model, without experts to serve")
    serving.check_model(config)
    if offload is not None or (servers is None and serving.kv_memory is not None):
        from moe_edge.serve.loading import check_room  # loads JAX

        check_room(checkpoint, k, offload, serving, config, devices)
    if serving.activations != "float32":
        check_checkpoint(checkpoint, k=k, activations=serving.activations)
    if serving.weights != "copied":
        check_weights(serving.weights, reader, offload, shared.mesh(reader, offload))
    model = make_served_model(
        str(checkpoint),
        reader,
        max_context=serving.context(config.max_positions),
        default_floor=serving.default_min_k,
        lossless=(offload is None or offload.lossless)
        and get_route(route, **(route_options or {})).lossless
        and serving.activations == serving.kv_cache == "float32",
    )
    make_loop(serving, model.own_k, NO_LIMITS, serving.step_costs())
    if servers is not None and server.prompt_cache_dir is not None:
        raise ConfigError(
            "--prompt_cache_dir with --servers: the caches of several servers are not "
            "kept; leave it out"
        )
    template = find_template(
        model.tokenizer.folder, server.chat_template, server.tool_parser
    )
    if servers is not None:
        from moe_edge.serve.cluster_run import Cluster, serve_cluster

        given = {"checkpoint": str(checkpoint), "servers": servers, "slots": slots}
        given |= {"route": route, "route_options": route_options}
        given |= {"k": k, "kv_cache": serving.kv_cache}
        return serve_cluster(Cluster(given, serving, server), reader, dry_run)
    if link is not None and link.index:
        from moe_edge.serve.following import follow_server

        return follow_server(link, checkpoint, k, serving, shared)
    from moe_edge.serve.service import listen

    with listen(server.host, server.port) as sock:
        if dry_run:
            return {"dry_run": True}
        from moe_edge.serve.http_service import serve_http
        from moe_edge.serve.loading import load_driver

        keep = server.prompt_cache_dir
        files: list[Any] = []

        def load():
            fail = server.fail_step
            given = checkpoint, k, offload, serving, shared
            driver = load_driver(*given, fail_step=fail, link=link)
            model.grammars.prepare()
            if keep is not None:
                from moe_edge.engine.prompt_files import PromptFiles

                files.append(PromptFiles(keep, _kept_model(reader, serving, offload)))
                files[0].load(driver.slots)
            return driver

        def save(driver):
            for each in files:
                each.save(driver.slots)
            if link is not None:
                driver.slots.end()

        given = load, sock, model, template, serving, server
        return serve_http(*given, before_close=save)


def _kept_model(reader, serving: ServingOptions, offload) -> dict[str, Any]:
    """What a prompt cache in a folder is of; reads all weights of others' formats."""
    return {
        "content": reader.content_sha256(),
        "top_k": reader.config.moe.top_k,
        "chunk": serving.prefill_chunk,
        "lossless": offload is None or offload.lossless,
        "deterministic": serving.deterministic,
        "blocks": [reader.layout.kind, reader.dense_kind],
        "activations": serving.activations,
        "kv_cache": serving.kv_cache,
    }
