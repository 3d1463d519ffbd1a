"""A command as one of several processes: what it is refused for before it begins."""

import contextlib
import inspect
import os
import signal

import numpy as np
import pytest

from moe_edge.commands import common
from moe_edge.core import processes
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.run_folder import RunFolder
from moe_edge.engine.devices import mesh_for
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.logits import check_logits_path, write_logits
from moe_edge.evaluate.run import run_evaluate
from moe_edge.hosts import run
from moe_edge.hosts.link import HostLostError
from moe_edge.hosts.options import HostOptions
from moe_edge.serve.run_serve import run_serve
from tests.hosts.test_link import Linked
from tests.support.live_run import unused_ports

TWO = {"num_processes": 2, "process_id": 1}


@pytest.fixture(autouse=True)
def alone_again():
    yield
    processes.become(0, 1)


def given(**more) -> dict:
    return {"coordinator": f"127.0.0.1:{unused_ports(1)[0]}", **TWO} | more


@pytest.mark.parametrize("command", [run_generate, run_evaluate, run_serve])
def test_commands_have_the_flags_of_processes(command):
    assert inspect.signature(HostOptions).parameters.keys() <= (
        inspect.signature(command).parameters.keys()
    )
    assert "join_timeout_s: how long processes wait" in command.__doc__


def test_a_second_process_without_the_first_ends_by_a_line_and_writes_nothing(tmp_path):
    with pytest.raises(HostLostError, match="did not answer process 1 within 0.1 s"):
        folder = str(tmp_path / "o")
        run_generate(prompt=["A"], out_dir=folder, **given(join_timeout_s=0.1))
    assert not processes.writes() and [*tmp_path.iterdir()] == []


def test_the_second_process_writes_no_results_and_no_logits(tmp_path):
    processes.become(1, 2)
    folder = RunFolder(tmp_path / "o")
    with folder.taken():
        folder.write(lambda at: pytest.fail("it writes"))
    path = check_logits_path(tmp_path / "no folder" / "l.npz", overwrite=False)

    class Engine:
        config = ModelSize()
        score = staticmethod(lambda rows: [(0, np.zeros((len(rows), 2, 5)))])

    assert write_logits(Engine, np.ones((3, 2), np.int32), path) == (3, 2, 5)
    assert [*tmp_path.iterdir()] == []


class ModelSize:
    vocab_size, max_positions = 5, 8


def test_an_unexpected_error_of_one_of_several_ends_it_at_once(monkeypatch, capsys):
    """Python's shutdown would wait for JAX's, and that for the other processes."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("moe_edge.commands.signals.install", lambda: None)
    processes.become(1, 2)

    def fail(argv):
        raise KeyError("x")

    assert common.leave(common.guarded(fail, [])) == 1
    assert codes == [1] and "KeyError: 'x'" in capsys.readouterr().err
    assert common.leave(common.guarded(lambda argv: 0, [])) == 0
    assert codes == [1]


def test_a_dry_run_waits_for_nobody(tmp_path):
    folder = str(tmp_path / "o")
    summary = run_generate(prompt=["A"], out_dir=folder, dry_run=True, **given())
    assert summary["dry_run"]


def test_offloading_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--device_memory with several processes"):
        folder, budget = str(tmp_path / "o"), {"device_memory": "25%"}
        run_generate(prompt=["A"], out_dir=folder, **budget, **given())


def test_a_server_of_several_processes_refuses_what_each_would_have_alone(monkeypatch):
    class Two:
        index, count = 0, 2

    monkeypatch.setattr("moe_edge.serve.run_serve.current_link", Two)
    for flag in ({"servers": 2}, {"prompt_cache_dir": "here"}):
        (name,) = flag
        with pytest.raises(ConfigError, match=f"--{name} with --num_processes 2"):
            run_serve(**flag)


def test_a_dense_model_is_refused(monkeypatch):
    class Dense:
        class config:
            moe_layers = ()

    processes.become(0, 2)
    with pytest.raises(ConfigError, match="2 processes, and a dense model has no"):
        mesh_for(Dense, None, None)


@pytest.mark.parametrize(
    ("error", "line", "kind"),
    [
        (CapacityError("too\nlong"), "too long", CapacityError),
        (KeyboardInterrupt(), "interrupted", KeyboardInterrupt),
        (KeyError("x"), "KeyError: 'x'", KeyError),
    ],
)
def test_who_ends_by_an_error_tells_the_others(error, line, kind, monkeypatch):
    linked = Linked(monkeypatch)
    linked.links[1].wait_lost = lambda: None
    assert isinstance(run._left(linked.links[1], error), kind)
    assert linked.line(0) == f"process 1 has ended: {line}"
    linked.end()


def test_a_collective_that_failed_is_a_lost_process(monkeypatch):
    import jax

    linked = Linked(monkeypatch)
    linked.links[1].wait_lost = lambda: None
    error = run._left(linked.links[1], jax.errors.JaxRuntimeError("Gloo: closed\nmore"))
    assert isinstance(error, HostLostError)
    assert str(error) == (
        "a step of several processes failed (JaxRuntimeError: Gloo: closed); start all "
        "of them again"
    )
    linked.end()


def test_the_wish_to_end_is_a_signal_to_process_0():
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("end"))
    try:
        run._end_in_order()
        with contextlib.suppress(InterruptedError):
            signal.sigtimedwait([], 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["end"]
