"""A load on our own server, over a tiny model."""

import threading

import pytest

from moe_edge.core.checks import RequestError
from moe_edge.loadtest.against_url import url_results
from moe_edge.loadtest.offered import LoadOptions, offered_requests
from tests.support.live_server import live_server

LOAD = LoadOptions(
    poisson=40.0,
    duration_s=0.4,
    prompt_tokens=20,
    output_tokens=8,
    floors="1:1,2:1",
    seed=6,
)


def test_every_request_gets_its_tokens_at_its_floor():
    with live_server() as server:
        url = f"http://127.0.0.1:{server.port}"
        results = url_results(url, None, LOAD, dry_run=False)
    offered = offered_requests(LOAD, 128)
    assert len(results.served) == len(offered) > 8 and not results.notes
    for one, request in zip(results.served, offered, strict=True):
        assert one.state == "finished" and one.made == request.new_tokens
        assert one.k_least == request.floor and one.k_sum == one.floor * one.made
        assert one.arrival_s < one.first_s <= one.last_s
    assert results.summary(1e3, 1e3)["slo_attainment"] == 1


def test_a_full_queue_refuses():
    with live_server(max_waiting=1) as server:
        server.driver.hold()  # one waits, nobody runs

        def let() -> None:
            try:
                server.until(
                    lambda: server.thread.summary()["outcomes"].get("refused", 0) > 3
                )
            finally:
                server.driver.let()

        waits = threading.Thread(target=let)
        waits.start()
        url = f"http://127.0.0.1:{server.port}"
        results = url_results(url, None, LOAD, dry_run=False)
        waits.join()
    outcomes = results.summary(1, 1)["outcomes"]
    assert outcomes["refused"] > 3 and outcomes["finished"] > 0 and not results.notes


def test_a_wrong_key_is_refused():
    with live_server(key=b"right") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert url_results(url, "right", LOAD, dry_run=False).served
        with pytest.raises(RequestError, match="/v1/models: 401 "):
            url_results(url, "wrong", LOAD, dry_run=False)
