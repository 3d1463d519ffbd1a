"""What the servers of a served cluster are told, without a cluster."""

import threading
from types import SimpleNamespace

from moe_edge.serve.cluster_server import Front, Holder


def server(kind):
    """One that was not made: what it does with an order needs no model."""
    made = object.__new__(kind)
    made.engine = SimpleNamespace(stepping=threading.Lock())
    made.told = []
    made.tell = lambda name, *more: made.told.append(name)
    return made


def test_table_is_taken_over_between_two_steps():
    holder, held = server(Holder), []
    holder.tables = SimpleNamespace(
        install=lambda: held.append(holder.engine.stepping.locked())
    )
    holder.make_orders()["table"].later({"version": 1}, {})
    assert held == [True]


def test_warming_up_compiles_the_programs_of_calls():
    holder = server(Holder)
    holder.compile = lambda *_: holder.told.append("compiled")
    holder.make_orders()["warm"].later({}, {})
    assert holder.told == ["compiled", "warm"]


def test_front_alone_is_told_to_serve():
    assert "serve" in server(Front).make_orders()
    assert "serve" not in server(Holder).make_orders()
