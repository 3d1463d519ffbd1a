"""The root of `moe-edge cluster`: starts the processes of a cluster and watches them.

It needs no JAX and computes nothing. On one machine it starts all processes; with
`--coordinator` and `--process_id` it starts one, which joins those elsewhere. Whatever
happens, nothing stays running.
"""

import contextlib
import dataclasses
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_edge.cluster.content import content_of
from moe_edge.cluster.gpus import gpu_environments
from moe_edge.cluster.model_checks import check_model, open_at_k
from moe_edge.cluster.modes import options_classes, options_of
from moe_edge.cluster.network.namespaces import EmulatedNetwork, emulated_network
from moe_edge.cluster.node.membership import free_port
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.scheduler.wanted import wanted_of
from moe_edge.cluster.spec import Spec
from moe_edge.cluster.supervisor import Processes
from moe_edge.cluster.transport.keys import new_secret, read_secret
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, check_cores
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.core.run_folder import OneOf, RunFolder, root, unpacked

LOCAL = "127.0.0.1"
PORT = 7077  # of the scheduler, in a namespace of its own


@root
@unpacked(options=OneOf(options_classes().values(), options_of))
def run_cluster(run: RunFolder, *, options: ClusterOptions) -> dict[str, Any]:
    """Serves requests on several processes that hold the experts of a model together.

    Args:
      run: folder of `cluster.json`, `generations.jsonl`, files of each method and
        `logs/`.
      options: of the cluster.
    Raises:
      MoeEdgeError: bad input, or a cluster that is lost (exit code 3).
    """
    reader = open_at_k(options)
    named = check_model(options, reader)
    if options.is_scheduler:
        wanted_of(options, load_tokenizer(reader), reader.config.max_positions)
    run.check_apart(reader.path, *options.files.values())
    if options.secret_file is not None:
        read_secret(options.secret_file)
    check_cores(options.cores, len(_numbers(options)))
    gpus = gpu_environments(options, _numbers(options), os.environ, named)
    address = _coordinator(options)
    if run.dry_run:
        return {"methods": options.method_names, "processes": _numbers(options)}
    # Where all processes are started here they read the same files.
    content = {} if options.coordinator is None else content_of(reader)
    with run.writing() as folder:
        logs = folder / "logs"
        logs.mkdir()
        with (
            shared_secret(options) as secret,
            tempfile.TemporaryDirectory() as work,
            _network(options) as network,
        ):
            hosts, prefixes = _hosts(options), {}
            if network is not None:
                names = {n: options.name_of(n) for n in _numbers(options)}
                hosts = {n: network.address(name) for n, name in names.items()}
                prefixes = {n: network.command(name) for n, name in names.items()}
                address = f"{hosts[0]}:{PORT}"
            spec = Spec(
                options=_absolute(options),
                folder=str(folder),
                secret=str(secret),
                hosts=hosts,
                coordinator=address,
                parent=os.getpid(),
                content=content,
            )
            spec.save(Path(work) / "spec.json")
            processes = Processes(
                *(Path(work) / "spec.json", options, logs, prefixes), own=gpus
            )
            with processes:
                processes.start(_numbers(options))
                processes.watch()
        stored = folder / "cluster.json"
        if not stored.is_file():  # one server, whose scheduler is elsewhere
            return {"process_id": options.process_id}
        facts = read_json(stored, strict=False, max_bytes=LARGE_FILE_BYTES)
    return options.result_of(facts)


def _numbers(options: ClusterOptions) -> list[int]:
    """The processes that are started here."""
    if options.process_id is not None:
        return [options.process_id]
    return list(range(options.processes))


def _coordinator(options: ClusterOptions) -> str:
    """HOST:PORT of the scheduler.

    Raises:
      ConfigError: the port is in use, and the scheduler is to be started here.
    """
    if options.coordinator is None:
        return f"{LOCAL}:{free_port(LOCAL)}"
    host, port = options.coordinator_address
    if options.is_scheduler:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"--coordinator {host}:{port} cannot be listened on: "
                    f"{error.strerror}; name a free port of this machine"
                ) from error
    return f"{host}:{port}"


def _hosts(options: ClusterOptions) -> dict[int, str]:
    """Address that each process started here binds."""
    host = LOCAL
    if options.coordinator is not None:
        host, port = options.coordinator_address
        if not options.is_scheduler:
            host = _own_address(host, port)
    return dict.fromkeys(_numbers(options), host)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to the scheduler; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigError(
                f"--coordinator {host}:{port} cannot be reached: {error}"
            ) from error
        return probe.getsockname()[0]


def _absolute(options: ClusterOptions) -> ClusterOptions:
    """The same with paths that hold wherever a process runs."""
    changed = {
        name: str(Path(path).resolve())
        for name, path in options.files.items()
        if path != "default"
    }
    return dataclasses.replace(options, **changed)


@contextlib.contextmanager
def _network(options: ClusterOptions) -> Iterator[EmulatedNetwork | None]:
    """Namespaces with slow links, removed at the end; None: the machine's own."""
    if options.link_mbps is None:
        yield None
        return
    names = [options.name_of(number) for number in _numbers(options)]
    with emulated_network(names, options.link_mbps) as network:
        yield network


@contextlib.contextmanager
def shared_secret(options: ClusterOptions) -> Iterator[Path]:
    """The file of the shared secret; one of this run's own is removed again."""
    if options.secret_file is not None:
        yield Path(options.secret_file).resolve()
        return
    handle, name = tempfile.mkstemp(prefix="moe_edge_secret_")
    try:
        os.write(handle, new_secret())  # mkstemp: mode 600
        os.close(handle)
        yield Path(name)
    finally:
        os.unlink(name)
