"""Every row ends, and is told of, though something around it fails."""

import json
import threading

from moe_edge.serve.request_log import RequestLog
from tests.support.live_server import WAIT_S, live_server, read_reply


def test_log_that_cannot_be_written_costs_no_request(capfd):
    log = RequestLog("/dev/full")
    with live_server(max_waiting=2) as server:
        server.thread.observers.all = (log, *server.thread.observers.all)
        server.driver.hold()
        sock = server.send_completion(n=4)
        server.until(lambda: server.thread.num_waiting == 4)
        assert server.complete().code == "queue_full"
        server.driver.let()
        assert read_reply(sock).status == 200
        assert (len(server.seen.ends), len(server.seen.refusals)) == (4, 1)
        server.until(lambda: not server.thread._open)
    assert server.error is None
    assert capfd.readouterr().err.count("OSError in") == 1
    log.close()
    assert capfd.readouterr().err.startswith("OSError in close")


def test_refused_rows_are_one_line_of_the_log(tmp_path):
    log = RequestLog(tmp_path / "log.jsonl")
    log.refused("/v1/completions", 2048)
    log.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    line = json.loads(line)
    assert line.pop("time") > 0
    assert line == {
        "endpoint": "/v1/completions",
        "outcome": "refused",
        "count": 2048,
    }


def test_rows_that_come_in_the_last_failing_step_end():
    begun, go_on = threading.Event(), threading.Event()

    def fail(rows, now_s):
        begun.set()
        assert go_on.wait(WAIT_S)
        raise RuntimeError

    with live_server() as server:
        server.driver.failing = True
        assert [server.complete().code for _ in range(2)] == ["engine_error"] * 2
        server.driver._compute = fail
        server.send_completion()
        assert begun.wait(WAIT_S)
        late = server.send_completion(n=2)
        server.until(lambda: server.thread.steps._inbox)
        go_on.set()
        assert read_reply(late).code == "engine_failed"
        server.wait_end()
    assert not server.driver.is_busy
    outcomes = server.thread.summary()["outcomes"]
    assert (outcomes["failed"], outcomes["cancelled"]) == (3, 2)
