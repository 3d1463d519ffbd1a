"""A load against a server of completions."""

import asyncio
import socket

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.loadtest.against_url import (
    STREAMED,
    UrlLoad,
    body_of,
    describe,
    tokenize,
    url_results,
)
from moe_edge.loadtest.http_client import Client, parse_url
from moe_edge.loadtest.offered import LoadOptions, Offered
from tests.support.completions_server import MAX_CONTEXT, K, running_server


def send(url, *sizes, key=None):
    """Serves requests of so many tokens at once, each on its own time."""
    requests = [Offered(i, 0.001 * i, 3, n, 8) for i, n in enumerate(sizes)]
    bodies = [
        body_of("tiny", (1, 2, 3), each.new_tokens, each.floor, **STREAMED)
        for each in requests
    ]

    async def main():
        client = Client(parse_url(url), key)
        load = UrlLoad(client, requests, bodies)
        await load.run()
        await client.close()
        return load

    return asyncio.run(main())


def test_answers_are_counted_and_timed():
    with running_server() as (url, server):
        load = send(url, 5, 1)
    long, short = load.served
    assert (long.state, long.made, long.k_least, long.k_sum) == (
        *("finished", 5, 8, 60),
    )
    assert 0 < long.first_s < long.last_s and short.first_s == short.last_s
    assert len(load.late_s) == 2 and min(load.late_s) >= 0 and load.failure is None
    body = server.bodies[0]
    assert body["min_k"] == 8 and body["ignore_eos"] and body["prompt"] == [1, 2, 3]


def test_every_end_has_its_outcome():
    statuses = {1: 429, 2: 504, 3: 500, 4: 0, 5: 1, 6: 2}
    with running_server(statuses=statuses) as (url, _):
        load = send(url, *range(1, 8))
    assert [one.state for one in load.served] == [
        *("refused", "expired", "failed", "failed", "failed", "failed", "finished"),
    ]
    with running_server(statuses={3: 500}) as (url, _):
        assert send(url, 3).failure == "500 told to say 500"
    with running_server(statuses={3: 1}) as (url, _):
        assert send(url, 3).failure == "the engine raised"


def test_connections_are_used_again():
    with running_server() as (url, server):

        async def main():
            client = Client(parse_url(url))
            for _ in range(4):
                await tokenize(client, "tiny", "ab")
            target = await describe(client, url)
            await client.close()
            return target

        assert asyncio.run(main()) == ("tiny", K, MAX_CONTEXT)
        assert server.connections == 1


def test_a_whole_load_is_sent():
    load = LoadOptions(poisson=200.0, duration_s=0.2, floors="8:1,16:1", seed=3)
    with running_server() as (url, server):
        results = url_results(url, None, load, dry_run=False)
    outcomes = {one.state for one in results.served}
    assert outcomes == {"finished"} and len(results.served) == len(server.bodies) > 10
    assert {body["min_k"] for body in server.bodies} == {8, 16}
    for body in server.bodies:
        assert len(body["prompt"]) + body["max_tokens"] <= MAX_CONTEXT
    assert results.made is None and len(results.late_s) == len(results.served)
    summary = results.summary(0.5, 0.02)
    assert summary["mean_k"] == 12 and summary["decisions_equal"] is None
    assert summary["floor_violations"] == sum(b["min_k"] == 16 for b in server.bodies)


def test_a_key_is_sent_and_a_wrong_one_refused():
    load = LoadOptions(poisson=50.0, duration_s=0.1)
    with running_server(key="right") as (url, _):
        assert url_results(url, "right", load, dry_run=False).served
        with pytest.raises(RequestError, match="/v1/models: 401 wrong key"):
            url_results(url, "wrong", load, dry_run=False)


def test_nobody_at_a_url_is_said():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        silent = f"no server answers at {url} .*moe-edge serve"
        with pytest.raises(ConfigError, match=silent):
            url_results(url, None, LoadOptions(poisson=1.0), dry_run=False)
    assert url_results(url, None, LoadOptions(poisson=1.0), dry_run=True) is None


def test_a_server_of_others_and_floors_above_its_k_are_refused(monkeypatch):
    with running_server() as (url, server):
        load = LoadOptions(poisson=1.0, floors="33")
        with pytest.raises(ConfigError, match="--floors asks for K 33, the model's is"):
            url_results(url, None, load, dry_run=False)
        monkeypatch.setattr(server, "_json", _plain(server))
        with pytest.raises(ConfigError, match="names no moe_edge k and max_context"):
            url_results(url, None, load, dry_run=False)


def _plain(server):
    """Answers without what is ours."""
    real = server._json
    return lambda writer, status, found: real(writer, status, {"data": [{"id": "m"}]})
