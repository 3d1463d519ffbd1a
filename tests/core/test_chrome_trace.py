import json

from moe_edge.core.events import Recorder
from tests.support.chrome_trace import assert_no_overlap


def test_an_engines_events_become_tracks_without_overlaps(tmp_path):
    recorder = Recorder()
    recorder.add("compute", 0.0, 0.5, layer=0, step=1)
    recorder.add("route", 0.5, layer=0, step=1)
    for expert, start_s in ((3, 0.5), (4, 0.75)):  # two links at once
        where = {"layer": 0, "expert": expert, "sub": expert - 3, "bytes": 8}
        recorder.add("transfer", start_s, 0.5, "demand", step=1, **where)
    recorder.add("wait", 0.5, 0.75, layer=0, step=1)
    recorder.write_timeline(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert_no_overlap(events)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == [
        *("compute", "routing", "transfer", "transfer (2)", "wait")
    ]
    spans = [e for e in events if "ts" in e]
    (second,) = [e for e in spans if tracks[e["tid"]] == "transfer (2)"]
    assert second["name"] == "demand layer 0 expert 4 sub 1"
    assert (second["ts"], second["dur"]) == (0.75e6, 0.5e6)
    assert second["args"] == {"step": 1, "bytes": 8}
