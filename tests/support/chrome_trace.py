"""What holds of every Chrome trace that is written here."""

import collections


def assert_no_overlap(events):
    """Spans of one track follow each other; tracks and processes have names."""
    named = {
        (e["name"], e["pid"], e["tid"] * (e["name"] == "thread_name"))
        for e in events
        if e["ph"] == "M"
    }
    tracks = collections.defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            end = event["ts"] + event.get("dur", 0)
            tracks[event["pid"], event["tid"]].append((event["ts"], end))
    for (process, thread), spans in tracks.items():
        assert {("process_name", process, 0), ("thread_name", process, thread)} <= named
        spans.sort()
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert end <= start * (1 + 1e-12), (process, thread, end, start)
