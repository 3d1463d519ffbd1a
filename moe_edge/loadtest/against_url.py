"""Requests to a server that speaks OpenAI's completions, each at its time.

Answers are streamed, and timed as their events arrive. How often tokens came and at
which K is what the server says in `usage`.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.json_reader import parse_json
from moe_edge.core.progress import counter
from moe_edge.loadtest.http_client import (
    BROKEN,
    Answer,
    Client,
    HttpError,
    message_of,
    parse_url,
)
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    block_tokens,
    check_floors,
    offered_requests,
)
from moe_edge.loadtest.prompts import Prompts, text_pieces
from moe_edge.loadtest.results import Results
from moe_edge.schedule.request import Request

MOST_S = 900.0  # for one answer
OUTCOMES = {429: "refused", 504: "expired"}  # of a status; of all others: failed
COMPLETIONS = "/v1/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def url_results(
    url: str, key: str | None, load: LoadOptions, dry_run: bool
) -> Results | None:
    """Sends a load to a server; None of a dry run.

    Raises:
      RequestError: it refuses to say what it serves; ConfigError: nobody is there.
    """
    return None if dry_run else asyncio.run(_results(url, key, load))


async def _results(url: str, key: str | None, load: LoadOptions) -> Results:
    client = Client(parse_url(url), key)
    try:
        target = await describe(client, url)
        check_floors(load.floors, target.k)
        requests = offered_requests(load, target.max_context)
        ids = [
            token
            for text in text_pieces(load.data_dir)
            for token in await tokenize(client, target.model, text)
        ]
        prompts = Prompts(ids, block_tokens(load), load.seed)
        bodies = [
            body_of(target.model, prompts(one), one.new_tokens, one.floor, **STREAMED)
            for one in requests
        ]
        print(f"{target.model} at {url}; {len(requests)} requests", flush=True)
        run = UrlLoad(client, requests, bodies)
        await run.run()
    finally:
        await client.close()
    notes = [f"a request failed: {run.failure}"] if run.failure else []
    return Results(served=run.served, late_s=run.late_s, notes=notes)


class Target(NamedTuple):
    """What a server says of itself.

    Attributes:
      model: its name; k: experts a token of its own; max_context: tokens of a request.
    """

    model: str
    k: int
    max_context: int


async def describe(client: Client, url: str) -> Target:
    """The model that a server serves.

    Raises:
      ConfigError: nobody is there, or no server of ours.
    """
    try:
        found = await client.get_json("GET", "/v1/models")
        first = found["data"][0]
        more = first["moe_edge"]
        return Target(str(first["id"]), int(more["k"]), int(more["max_context"]))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ConfigError(
            f"no server answers at {url} ({error}); start one with moe-edge serve"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise ConfigError(
            f"{url}/v1/models names no moe_edge k and max_context ({error!r}); is it "
            "a server of moe-edge serve?"
        ) from error


async def tokenize(client: Client, model: str, text: str) -> list[int]:
    """Ids of a piece of a text by the server's tokenizer, without special tokens."""
    given = {"model": model, "prompt": text, "add_special_tokens": False}
    found = await client.get_json("POST", "/tokenize", given)
    return list(found["tokens"])


def body_of(
    model: str, prompt: Sequence[int], new_tokens: int, floor: int | None, **more
) -> bytes:
    """A request as it is sent: greedy, to its last token."""
    given = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if floor is not None:
        given["min_k"] = floor
    return json.dumps(given | more).encode()


class UrlLoad:
    """Sends requests at their times, however far those before have come.

    Attributes:
      served: of each request; late_s: how long after its time each was sent.
      failure: what was said of the first one that failed; None: none did.
    """

    def __init__(self, client: Client, requests: Sequence[Offered], bodies):
        self._client, self._requests, self._bodies = client, requests, bodies
        self.served = [
            Request(each.id, arrival_s=each.arrival_s, floor=each.floor)
            for each in requests
        ]
        self.late_s: list[float] = []
        self.failure: str | None = None

    async def run(self) -> None:
        """Until the last answer has ended."""
        loop = asyncio.get_running_loop()
        self._start_s, tasks = loop.time(), []
        with counter("requests answered", len(self._requests)) as count:
            for request, body, served in zip(
                self._requests, self._bodies, self.served, strict=True
            ):
                wait_s = self._start_s + request.arrival_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                task = asyncio.create_task(self._one(request, body, served))
                task.add_done_callback(lambda _: count(1))
                tasks.append(task)
            await asyncio.gather(*tasks)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    async def _one(self, request: Offered, body: bytes, served: Request) -> None:
        self.late_s.append(max(self._now_s() - request.arrival_s, 0.0))
        try:
            async with asyncio.timeout(MOST_S):
                asked = self._client.request("POST", COMPLETIONS, body)
                async with asked as answer:
                    served.state = await self._read(answer, served)
        except (OSError, *BROKEN, HttpError) as error:
            self._failed(served, str(error) or type(error).__name__)

    async def _read(self, answer: Answer, served: Request) -> str:
        """How a request ended."""
        if answer.status != 200:
            outcome = OUTCOMES.get(answer.status, "failed")
            message = message_of(await answer.json())
            if outcome == "failed":
                self._failed(served, f"{answer.status} {message}")
            return outcome
        outcome = "failed"
        async for data in answer.events():
            if data == b"[DONE]":
                continue
            time_s, event = self._now_s(), _event(data)
            if "error" in event:
                self._failed(served, message_of(event))
                return "failed"
            for choice in event.get("choices") or ():
                served.first_s = time_s if served.first_s is None else served.first_s
                served.last_s = time_s
                served.made += 1  # where the server counts, it says so at the end
                if choice.get("finish_reason"):
                    outcome = "finished"
            if event.get("usage"):
                _count(served, event["usage"])
        return outcome

    def _failed(self, served: Request, message: str) -> None:
        served.state = "failed"
        self.failure = self.failure or message


def _event(data: bytes) -> dict[str, Any]:
    event = parse_json(f"event {data[:60]!r}", data, HttpError)
    if not isinstance(event, dict):
        raise HttpError(f"event {data[:60]!r} is no JSON object")
    return event


def _count(served: Request, usage: dict[str, Any]) -> None:
    """Tokens and their K, as the server counted them."""
    served.made = int(usage.get("completion_tokens", served.made))
    ours = usage.get("moe_edge") or {}
    if ours.get("k_mean") is not None:
        served.k_sum = round(ours["k_mean"] * served.made)
        served.k_least = ours["k_min"]
