"""How far a reader walks for a call whose server is lost, until tokens go on."""

from tools.call_walk import call_walk

MOST = 22  # 19 to 21 as a rule: what was on its way when it was lost differs


def test_a_lost_call_passes_few_files():
    walk = call_walk()
    assert len(walk.way) <= MOST, walk.way
    node, ends = "cluster/node/remote.py", "cluster/transport/messages/watch.py"
    assert {node, ends, "cluster/prism/table_keeper.py"} <= {*walk.way}
    assert "newer" in walk.entered["cluster/node/tables.py"]
