import json

from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.timeline import write_timeline
from tests.support.chrome_trace import assert_no_overlap
from tests.support.tiny_cluster import asked, constant_pools, placed, tiny_costs


def test_spans_of_a_remote_call_are_written_for_perfetto(tmp_path):
    costs = tiny_costs((1, 1))
    loop = ClusterLoop(
        asked((0, 0.0, 1, 2, "a")),
        placed([[0, -1]], [[-1, 0]]),
        costs,
        constant_pools(2, a=[[1]]),
        LoopOptions(timeline_s=1.0),
        0,
    )
    loop.run()
    write_timeline(tmp_path / "t.json", loop.spans, costs.cluster)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert_no_overlap(events)
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    spans = [
        (names[e["pid"], e["tid"]], e["pid"], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]
    # The second token begins at 1.125 s: after the end of what is kept.
    assert spans == [
        ("GPU 0", 0, "dense", 0.0, 5e5),
        ("link to server1", 0, "call", 5e5, 1.25e5),
        ("GPU 0", 1, "called", 6.875e5, 2.5e5),
        ("link to server0", 1, "call", 9.375e5, 1.25e5),
    ]
