"""`/metrics`, `/experts` and `/` of a running server."""

import threading

import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.serve.metrics import CONTENT_TYPE
from moe_edge.serve.pages import FILES, POLICY
from tests.support.live_server import live_server
from tests.support.prometheus import Reading

KEY = "a-key"


@pytest.fixture(scope="module")
def server():
    with live_server(max_waiting=1) as running:
        yield running


def read(server) -> Reading:
    reply = server.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"] == CONTENT_TYPE
    return Reading(reply.raw.decode())


def test_metrics_add_up_and_experts_are_counted(server):
    assert read(server).value("generated_tokens") == 0
    done = [server.complete(max_tokens=n).json["usage"] for n in (1, 3)]
    server.driver.hold()
    sock = server.send_completion(stream=True)
    server.until(lambda: read(server).value("requests_waiting") == 1)
    assert server.complete(n=3).status == 429
    sock.close()
    server.until(lambda: read(server).outcomes()["cancelled"] == 1)
    server.driver.let()
    now = read(server)
    wanted = {"finished": 2, "cancelled": 1, "refused": 3, "failed": 0, "expired": 0}
    assert now.outcomes() == wanted
    assert now.value("requests_running") == now.value("requests_waiting") == 0
    assert now.value("generated_tokens") == 4
    assert now.value("prompt_tokens") == sum(usage["prompt_tokens"] for usage in done)
    assert "river" not in now.text

    report = server.get("/experts").json
    assert set(report) == {
        "mode", "k", "layers", "bytes", "prediction", "sampled_steps"
    }  # fmt: skip
    assert set(report["layers"][0]) == {
        "layer", "slots", "resident", "used", "hits", "misses", "hit_ratio"
    }  # fmt: skip
    assert (report["mode"], report["sampled_steps"]) == ("resident", 1)
    # The first step was the first prompt's; its K is the model's own.
    pairs = done[0]["prompt_tokens"] * server.model.own_k
    assert [sum(layer["used"]) for layer in report["layers"]] == [pairs] * len(
        report["layers"]
    )


def test_page_has_its_own_policy(server):
    for path, file in FILES.items():
        reply = server.get(path)
        assert reply.status == 200 and reply.raw == file.read_bytes()
        assert reply.headers["content-security-policy"] == POLICY


def test_page_is_open_and_what_it_asks_for_is_not():
    with live_server(key=KEY.encode()) as server:
        for path in FILES:
            assert server.get(path).status == 200
        for path in ("/metrics", "/experts"):
            assert server.get(path).code == "invalid_api_key"
            assert server.get(path, Authorization=f"Bearer {KEY}").status == 200


def test_metrics_without_an_engine_are_what_was_refused():
    begin = threading.Event()

    def load():
        begin.wait()
        raise CapacityError("no room")

    with live_server(load=load, ready=False) as server:
        try:
            assert server.complete().code == "loading"
            assert server.get("/experts").code == "loading"
            now = read(server)
            assert now.outcomes()["refused"] == 1
            assert "moe_edge_kv_bytes" not in now.families
        finally:
            begin.set()
