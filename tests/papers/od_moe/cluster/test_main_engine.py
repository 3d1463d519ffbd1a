"""When the main node tells the shadow of keys and values."""

import types

import numpy as np
import pytest

from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.papers.od_moe.cluster.main_engine import MainEngine


class Listener:
    """Notes what it is told, in order."""

    def __init__(self):
        self.told = []

    def rows(self, session, index):
        self.told.append(("rows", index))

    def token(self, session, index, token):
        self.told.append(("token", index, token))


@pytest.mark.parametrize(
    "moe_layers, expected",
    [
        # All layers' keys are there when the last calls are out: they go meanwhile.
        ((0, 2), [("token", 1, 7), "calls", "calls", ("rows", 2), ("token", 2, 8)]),
        # A dense layer comes behind: before the next token.
        (
            (0, 1),
            [("rows", 1), ("token", 1, 7), "calls", "calls", ("rows", 2)]
            + [("token", 2, 8)],
        ),
    ],
)
def test_keys_and_values_go_as_soon_as_all_are_there(monkeypatch, moe_layers, expected):
    engine = MainEngine.__new__(MainEngine)
    engine.config = types.SimpleNamespace(num_layers=3, moe_layers=moe_layers)
    engine._place = {layer: place for place, layer in enumerate(moe_layers)}
    engine._asked = types.SimpleNamespace(view=None)
    engine.listener = listener = Listener()
    engine.restart()
    monkeypatch.setattr(PlacedEngine, "_here", lambda *_: "nothing")
    for token in (7, 8):
        engine._begin_tokens(None, np.array([token]), None)
        if token == 7:
            for layer in moe_layers:
                listener.told.append("calls")
                assert engine._here(layer) == "nothing"
    assert listener.told == expected
    engine._decodes = False  # a prompt's are sent with the first token
    engine._here(2)
    assert listener.told == expected
