import json
import threading

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.clock import WallClock
from moe_edge.core.events import Event, Recorder


def test_clock_counts_seconds_from_its_start(monkeypatch):
    now = iter((100.0, 100.5, 103.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = WallClock()
    assert (clock.now(), clock.now(), clock.at(107.0)) == (0.5, 3.0, 7.0)


def test_recorder_keeps_events_in_order():
    recorder = Recorder()
    recorder.add("transfer", 0.1, 0.5, "demand", layer=1, expert=2, bytes=10)
    recorder.add("hit", 0.4, layer=1, expert=2)
    assert recorder.events()[0] == Event(
        0.1, 0.5, "transfer", "demand", layer=1, expert=2, bytes=10
    )


def test_disabled_recorder_keeps_nothing():
    recorder = Recorder(enabled=False)
    recorder.add("hit", 0.0)
    assert recorder.events() == []
    recorder.enabled = True
    recorder.add("hit", 0.0)
    assert len(recorder.events()) == 1
    recorder.clear()
    assert recorder.events() == []


def test_threads_lose_no_event():
    recorder = Recorder()

    def add(step):
        for layer in range(2000):
            recorder.add("route", 0.0, step=step, layer=layer)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    seen = {(event.step, event.layer) for event in recorder.events()}
    assert len(recorder.events()) == len(seen) == 8000


def test_write_jsonl_has_every_field_in_order_of_time(tmp_path):
    recorder = Recorder()
    recorder.add("compute", 2.0, 0.5, layer=3)
    recorder.add("transfer", 1.0, 0.5, "prefetch", request="a", step=4, bytes=64)
    recorder.write_jsonl(tmp_path / "events.jsonl")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    names = "t_s dur_s kind cause request step layer expert sub server bytes".split()
    assert list(first) == names
    assert first == dict.fromkeys(names) | {
        **{"t_s": 1.0, "dur_s": 0.5, "kind": "transfer", "cause": "prefetch"},
        **{"request": "a", "step": 4, "bytes": 64},
    }
    assert second["t_s"] == 2.0 and second["cause"] is None and second["layer"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize(
    ("kind", "cause", "match"),
    [
        ("teleport", None, "unknown event kind 'teleport'; known: call, compute"),
        ("hit", "magic", "unknown event cause 'magic'; known: demand, migrate"),
    ],
)
def test_write_jsonl_rejects_unknown_words(tmp_path, kind, cause, match):
    recorder = Recorder()
    recorder.add(kind, 0.0, cause=cause)
    with pytest.raises(ConfigError, match=match):
        recorder.write_jsonl(tmp_path / "events.jsonl")
    assert list(tmp_path.iterdir()) == []
