"""Suite `serving`: a server behind HTTP: its loop alone beside it, ready, its memory.

The server is a process of `moe-edge serve`; its client is this process.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_edge.bench.live import CACHE, KEEP_ALL
from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import Models, Rows, make_row
from moe_edge.core.checks import ConfigError
from moe_edge.core.json_reader import parse_json
from moe_edge.engine.load import load_engine
from moe_edge.loadtest.against_url import body_of
from moe_edge.loadtest.http_client import Client, message_of, parse_url
from moe_edge.studies.speed.serving import ServingSettings
from moe_edge.studies.speed.serving_loop import driver_of, same_requests, serve_all

SERVE = "moe_edge.commands.main", "serve"
PLAIN_BAR, STREAMED_BAR = 1.05, 1.10
EMPTY_S, FULL_S = 150.0, 30.0
GROWTH_MB = 30.0
OPEN = 32  # requests that are open at a time while memory is watched
WATCHED_PROMPT, WATCHED_NEW = 8, 4  # tokens of each of them
END_S = 60.0


class LiveServer:
    """A server of its own process, ready.

    Attributes:
      ready: its first line; ready_s: from the start of its process until then.
    """

    def __init__(self, checkpoint: Path, settings: ServingSettings, *flags: str):
        given = {
            "checkpoint": checkpoint,
            "port": 0,
            "max_batch": settings.max_batch,
            "max_context": settings.max_context,
            "max_waiting": 10 * settings.loop_requests,
        }
        named = [f"--{name}={value}" for name, value in given.items()]
        started_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *SERVE, *named, *flags],
            stdout=subprocess.PIPE,
            env=os.environ | KEEP_ALL,
            text=True,
        )
        line = self._process.stdout.readline()
        self.ready_s = time.monotonic() - started_s
        if not line:
            self._process.communicate()
            raise ConfigError(
                f"moe-edge serve ended with {self._process.returncode} before it was "
                "ready"
            )
        self.ready: dict[str, Any] = parse_json("moe-edge serve's first line", line)

    def close(self) -> dict[str, Any]:
        """Ends it; what its last line says."""
        self._process.terminate()
        try:
            out, _ = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        last = out.strip().splitlines()[-1:]
        return parse_json("moe-edge serve's last line", last[0]) if last else {}

    def rss_bytes(self) -> int:
        """Memory that the process occupies now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024


@contextlib.contextmanager
def serving(*args, **kwargs) -> Iterator[LiveServer]:
    """A server, ended in any case."""
    server = LiveServer(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def send_all(ready: dict, bodies: Sequence[bytes], most_open: int) -> float:
    """Seconds until all answers were read; they are not parsed.

    Raises:
      ConfigError: one is no 200.
    """
    return asyncio.run(_send_all(ready["url"], bodies, most_open))


async def _send_all(url: str, bodies: Sequence[bytes], most_open: int) -> float:
    client, places = Client(parse_url(url)), asyncio.Semaphore(most_open)

    async def send(body: bytes) -> None:
        async with places:
            async with client.request("POST", "/v1/completions", body) as answer:
                if answer.status != 200:
                    said = message_of(await answer.json())
                    raise ConfigError(f"the server said {answer.status}: {said}")
                async for _ in answer.parts():
                    pass

    started_s = time.perf_counter()
    try:
        await asyncio.gather(*map(send, bodies))
    finally:
        await client.close()
    return time.perf_counter() - started_s


def http_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """The same requests to the loop in this process and to a server, in turn."""
    path = models[-1][1]
    engine = load_engine(path, with_tokenizer=False).engine
    asked = same_requests(engine, settings, engine.config.moe.top_k)
    driver = driver_of(engine, settings)
    with serving(path, settings) as server:
        cases = {"loop": lambda: serve_all(driver, asked)}
        for name, stream in (("plain", False), ("streamed", True)):
            model, more = server.ready["model"], {"stream": stream}
            bodies = [
                body_of(model, each.prompt, each.new_tokens, each.floor, **more)
                for each in asked
            ]
            cases[name] = lambda bodies=bodies: send_all(
                server.ready, bodies, len(bodies)
            )
        found = interleave(cases, settings.repeats)
    n, P, N = settings.loop_requests, settings.prompt_tokens, settings.new_tokens
    return [
        make_row(
            f"HTTP, {name}, {n} requests of {P} + {N} tokens",
            found[name],
            "s",
            peer=found["loop"],
            peer_name="the loop in one process",
            bar=bar,
        )
        for name, bar in (("plain", PLAIN_BAR), ("streamed", STREAMED_BAR))
    ]


def ready_rows(settings: ServingSettings, work_dir: Path, models: Models) -> Rows:
    """From the start of the process to ready, by what is compiled already."""
    before, seconds = os.environ.get(CACHE), {"empty": [], "full": []}
    try:
        for _ in range(settings.repeats):
            with tempfile.TemporaryDirectory(dir=work_dir) as cache:
                os.environ[CACHE] = cache
                for name in seconds:
                    with serving(models[-1][1], settings) as server:
                        seconds[name].append(server.ready_s)
    finally:
        os.environ.pop(CACHE)
        if before is not None:
            os.environ[CACHE] = before
    return [
        make_row(f"ready, compile cache {name}", seconds[name], "s", limit=limit)
        for name, limit in (("empty", EMPTY_S), ("full", FULL_S))
    ]


def memory_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """Growth of the server's memory from a tenth of the requests to all of them."""
    path, count = models[-1][1], settings.memory_requests
    first = max(count // 10, 1)
    engine = load_engine(path, with_tokenizer=False).engine
    own, vocab = engine.config.moe.top_k, engine.config.vocab_size
    with serving(path, settings) as server:

        def send(start: int, stop: int) -> int:
            """Sends requests of these numbers; bytes of the server after them."""
            bodies = [
                body_of(
                    server.ready["model"],
                    [
                        (number * 31 + place * 7) % vocab
                        for place in range(WATCHED_PROMPT)
                    ],
                    WATCHED_NEW,
                    own,
                    stream=number % 2 == 0,
                )
                for number in range(start, stop)
            ]
            send_all(server.ready, bodies, OPEN)
            return server.rss_bytes()

        warm = send(0, first)
        grown = (send(first, count) - warm) / 1e6
    case = f"memory, growth from {first} to {count} requests"
    return [make_row(case, [grown], "MB", limit=GROWTH_MB, after_first=warm)]
