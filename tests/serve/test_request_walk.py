"""How far a reader walks for a request: the files between its bytes and its tokens."""

from tools.request_walk import request_walk

MOST = 21


def test_a_request_passes_few_files():
    walk = request_walk()
    assert len(walk.way) <= MOST, walk.way
    ends = {"serve/connection.py", "schedule/loop.py", "engine/slots.py"}
    assert {*ends, "serve/answers.py"} <= {*walk.way} <= {*walk.entered}
    assert "decode" in walk.entered["engine/slots.py"]
