"""Whole runs: supervisor, scheduler and servers as processes.

Most are slow tests: what nodes do is tested with all of them in one process, in
`node`, `prism`, `od_moe` and `scheduler`.
"""

import json
import os
import shutil
import signal

import pytest

from moe_edge.cluster.run import run_cluster
from moe_edge.engine.run_generate import run_generate
from moe_edge.workload.cluster_run import locality
from moe_edge.workload.cluster_run_reader import ClusterRun, read_facts
from moe_edge.workload.trace_reader import read_trace
from tests.support.live_run import unused_ports, wait_until

NEW = 20
LONG = 96  # where a drill strikes: what it strikes must still have work
SLOTS = "12,12"  # of every run: programs are compiled once


def tokens_in(folder) -> dict[str, list[int]]:
    lines = (folder / "generations.jsonl").read_text().splitlines()
    return {row["id"]: row["tokens"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def of_one_machine(tiny, prompts, tmp_path_factory) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("generate") / "o"
    run_generate(
        out_dir=str(folder),
        checkpoint=tiny,
        prompts=str(prompts),
        max_new_tokens=LONG,
        batch_size=1,
    )
    return tokens_in(folder)


def first(tokens: dict[str, list[int]], count: int = NEW) -> dict[str, list[int]]:
    return {name: row[:count] for name, row in tokens.items()}


@pytest.fixture
def serve(tiny, prompts, tmp_path):
    """Runs a cluster of two servers in the test's folder: its summary."""

    def run(**options) -> dict:
        given = {"servers": 2, "slots": SLOTS, "max_new_tokens": NEW} | options
        if "workload" not in given:
            given["prompts"] = str(prompts)
        return run_cluster(out_dir=str(tmp_path / "o"), checkpoint=str(tiny), **given)

    return run


@pytest.mark.slow
def test_servers_give_the_tokens_of_one_machine(serve, of_one_machine, tmp_path):
    """Two methods in turn, blocks migrate over the network meanwhile."""
    more = {"period_s": 0.05, "source": "network"}
    summary = serve(methods="optimal,greedy", **more)
    folder = tmp_path / "o"
    assert tokens_in(folder) == first(of_one_machine)
    assert summary["same_tokens"] and not summary["failures"]
    assert (summary["lost_requests"], summary["compiled_after_warmup"]) == (0, 0)
    facts = read_facts(folder)
    assert facts.slots == [10, 10]
    for method in ("optimal", "greedy"):
        row = summary["methods"][method]
        trace = read_trace(folder / f"trace_{method}.csv.gz", facts.num_experts)
        found = locality(trace, facts.chunk_tokens)
        assert found.local_ratio == pytest.approx(row["local_ratio"])
        assert found.remote_calls == row["remote_calls"] > 0
        run = ClusterRun(folder)
        read = run.method(method)
        assert read.calibration != run.calibration  # it has costs of its own
        moves = sum(len(change.moves) for change in read.changes)
        assert moves == row["moved_blocks"]
    assert sum(row["moved_blocks"] for row in summary["methods"].values()) > 0
    logs = sorted(path.name for path in (folder / "logs").iterdir())
    assert logs == ["scheduler.log", "server0.log", "server1.log"]


@pytest.mark.slow
def test_servers_with_a_route_state_what_it_changed_and_take_a_k(serve, tmp_path):
    route = {"route": "prefer", "route_options": {"bonus": 3.0}}
    row = serve(**route)["methods"]["optimal"]
    assert 0 < row["substituted_share"] < 1
    row = serve(k=1, overwrite=True)["methods"]["optimal"]
    assert "substituted_share" not in row
    assert read_facts(tmp_path / "o").top_k == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prism", "od_moe"])
def test_caches_in_fewer_bytes_give_the_tokens_of_one_machine(
    mode, tiny, prompts, tmp_path
):
    """An OD-MoE shadow of full precision, with such caches too, foresees all."""
    both = {"checkpoint": str(tiny), "prompts": str(prompts), "kv_cache": "bfloat16"}
    both["max_new_tokens"] = NEW
    run_generate(out_dir=str(tmp_path / "alone"), batch_size=1, **both)
    given = {"servers": 2, "slots": SLOTS}
    if mode == "od_moe":
        given = {"workers": 2, "groups": 1, "shadow": "full"}
    summary = run_cluster(out_dir=str(tmp_path / "o"), mode=mode, **both, **given)
    assert tokens_in(tmp_path / "o") == tokens_in(tmp_path / "alone")
    assert summary["lost_requests"] == summary["compiled_after_warmup"] == 0
    assert summary.get("recall", 1.0) == 1.0


@pytest.mark.slow
def test_workload_of_task_families(serve, tmp_path):
    more = {"requests_per_server": 1, "interval_s": 0.05, "output_tokens": 4}
    more["seed"] = 3  # of it, prompts are of one shape
    summary = serve(workload="arithmetic,words", **more)
    assert summary["lost_requests"] == 0
    assert len(tokens_in(tmp_path / "o")) == 2


@pytest.mark.slow
def test_a_server_that_a_drill_stops_is_replaced(serve, of_one_machine, tmp_path):
    summary = serve(drill="stop:0@10", max_new_tokens=LONG, hung_s=2.0)
    assert tokens_in(tmp_path / "o") == of_one_machine
    check_struck(summary, "hung")


@pytest.mark.slow
@pytest.mark.parametrize("hung_s", [2.0, 10.0])
def test_a_server_that_pauses_for_3_s_serves_on(serve, tmp_path, hung_s):
    """With a short limit it is lost first, and comes back with no blocks."""
    asked = {"workload": "arithmetic,words", "output_tokens": 4, "seed": 3}
    asked |= {"requests_per_server": 8}
    serve(**asked, interval_s=0.01)
    wanted = tokens_in(tmp_path / "o")
    more = {"drill": "pause:0@6", "hung_s": hung_s, "overwrite": True}
    summary = serve(**asked, **more, interval_s=1.5)
    assert tokens_in(tmp_path / "o") == wanted
    assert summary["lost_requests"] == summary["degraded"] == 0
    if hung_s > 3:
        assert not summary["failures"]
    else:
        check_struck(summary, "hung")
        (failure,) = summary["failures"]
        assert failure["returned_s"] > failure["struck_s"] + 2.9


@pytest.mark.slow
def test_a_server_that_calls_six_others_hung_evicts_nobody(
    serve, of_one_machine, tmp_path
):
    seven = {"servers": 7, "slots": ",".join(["4"] * 7)}
    summary = serve(**seven, drill="accuse:0@10", max_new_tokens=LONG)
    assert tokens_in(tmp_path / "o") == of_one_machine
    assert not summary["failures"] and not summary["bad_pairs"]
    assert summary["lost_requests"] == summary["degraded"] == 0


def check_struck(summary: dict, kind: str) -> None:
    """Server 0 was lost by a drill, and no request with it."""
    (failure,) = summary["failures"]
    assert (failure["server"], failure["kind"]) == (0, kind)
    # How fast is measured by the suite `cluster`: other tests load this machine.
    assert failure["struck_s"] < failure["detected_s"] < failure["resumed_s"]
    assert summary["lost_requests"] == 0


def flags_of(tiny, prompts, **more) -> list[str]:
    given = {"checkpoint": tiny, "servers": 2, "slots": SLOTS, "out_dir": "o"}
    given["max_new_tokens"] = NEW
    if more.get("process_id", 0) == 0:
        given["prompts"] = prompts
    return [f"--{name}={value}" for name, value in (given | more).items()]


@pytest.fixture
def start_apart(start, tiny, prompts, tmp_path, secret):
    """Starts a supervisor for each of three processes; servers read a copy."""

    def start_all(**more) -> list:
        copy = shutil.copytree(tiny, tmp_path / "copy")
        where = {"coordinator": f"127.0.0.1:{unused_ports(1)[0]}"}
        where["secret_file"] = secret
        return [
            start(
                *flags_of(
                    copy if number else tiny,
                    prompts,
                    process_id=number,
                    out_dir=f"o{number}",
                    **where | more,
                )
            )
            for number in range(3)
        ]

    return start_all


@pytest.mark.slow
def test_without_the_scheduler_all_end_with_code_3(start_apart, tmp_path):
    runs = start_apart(drill="kill:scheduler@10", max_new_tokens=LONG)
    assert [run.wait() for run in runs] == [3, 3, 3], [run.stderr for run in runs]
    assert runs[0].errors == [
        "error: scheduler was killed by signal 9; all its processes are ended"
    ]
    for server, run in enumerate(runs[1:]):
        (line,) = run.errors
        text = f"error: server{server} ended with code 3: the scheduler"
        assert line.startswith(text), run.stderr
    assert not any(run.below() for run in runs)
    assert not list(tmp_path.glob("o?"))


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_when_the_supervisor_ends_nothing_is_left(start, tiny, prompts, number, code):
    run = start(*flags_of(tiny, prompts))
    wait_until(lambda: len(run.below()) == 3 or run.process.poll() is not None)
    os.kill(run.process.pid, number)
    assert run.wait() == code, run.stderr
    wait_until(lambda: not run.below())


def test_a_server_that_dies_at_its_start_ends_the_run_at_once(start, tiny, prompts):
    run = start(*flags_of(tiny, prompts))
    wait_until(lambda: 2 in run.below())
    os.kill(run.below()[2], signal.SIGKILL)
    assert run.wait() == 3
    assert run.errors[-1].startswith("error: server1 was killed by signal 9")
    assert not run.below()


@pytest.mark.slow
def test_a_server_that_dies_while_all_warm_up_ends_the_run(start, tiny, prompts):
    # To warm up they read blocks over a link on which that takes minutes.
    slow = {"methods": "optimal,moe_infinity", "host_bytes_per_s": 100}
    run = start(*flags_of(tiny, prompts, **slow))
    run.wait_for("processes joined")
    os.kill(run.below()[2], signal.SIGKILL)
    assert run.wait() == 3
    assert run.errors == [
        "error: scheduler ended with code 3: server 1 is dead before all have begun; "
        "all its processes are ended"
    ]
    assert not run.below()


@pytest.mark.slow
def test_supervisors_of_several_machines_join_and_lose_a_server(
    start_apart, of_one_machine, tmp_path
):
    """Each has its own copy of the checkpoint; only the first knows the requests."""
    runs = start_apart(drill="kill:0@10", max_new_tokens=LONG)
    assert [run.wait() for run in runs] == [0, 3, 0], [run.stderr for run in runs]
    assert tokens_in(tmp_path / "o0") == of_one_machine
    check_struck(runs[0].summary, "dead")
    assert runs[1].errors[-1:] == [  # before that, its log
        "error: server0 was killed by signal 9; all its processes are ended"
    ]
    assert runs[2].summary == {"process_id": 2, "out_dir": "o2"}
    assert (tmp_path / "o2" / "logs" / "server1.log").is_file()


@pytest.mark.slow
def test_who_does_not_fit_is_refused_and_the_others_wait_on(
    start, tiny, prompts, tmp_path, secret
):
    where = {"coordinator": f"127.0.0.1:{unused_ports(1)[0]}", "secret_file": secret}
    scheduler = start(
        *flags_of(tiny, prompts, process_id=0, join_timeout_s=300, **where)
    )
    other = shutil.copytree(tiny, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    wrong = tmp_path / "wrong"
    wrong.write_text("another secret of the tests")
    wrong.chmod(0o600)
    where |= {"process_id": 2, "join_timeout_s": 120}
    runs = {
        "give all processes the same --secret_file": {"secret_file": wrong},
        "process 2 has --slots 9,11, the scheduler 12,12": {"slots": "9,11"},
        "process 2 has another model.safetensors in its --": {"checkpoint": other},
    }
    runs = {
        text: start(*flags_of(tiny, prompts, **where | {"out_dir": f"o{i}"} | more))
        for i, (text, more) in enumerate(runs.items())
    }
    for text, run in runs.items():
        assert run.wait() == 2
        assert len(run.errors) == 1 and text in run.errors[0]
    assert scheduler.process.poll() is None and list(scheduler.below()) == [0]


@pytest.mark.slow
def test_who_is_missing_is_named(start, tiny, prompts, secret):
    where = {"secret_file": secret, "join_timeout_s": 0.5}
    ports = unused_ports(2)
    runs = [
        start(
            *flags_of(
                tiny,
                prompts,
                process_id=number,
                coordinator=f"127.0.0.1:{port}",
                **where | {"out_dir": f"o{number}"},
            )
        )
        for number, port in enumerate(ports)
    ]
    assert [run.wait() for run in runs] == [2, 2]
    assert runs[0].errors == [
        "error: processes [1, 2] have not come within 0.5 s; start them, or raise "
        "--join_timeout_s"
    ]
    assert runs[1].errors == [
        f"error: no scheduler at 127.0.0.1:{ports[1]} within 0.5 s; is it running, and "
        "is --coordinator its address?"
    ]
