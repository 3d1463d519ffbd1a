"""The parts that wait for a GPU (tools/gpu) start, and docs/gpu_todo.md knows them."""

import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.workload.trace_writer import write_trace
from moe_edge.workload.traces import DECODE
from tests.support.traces import make_trace

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tools" / "gpu"
PARTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "common")
# With tiny sizes on a CPU, up to 20 s of it each; `peers` says which packages are not
# there. The suites, commands and builds that others are have tests of their own.
TINY = (
    *(path.stem for path in PARTS if path.stem != "pretrain"),
    *("machine", "coserve"),
)
ON_A_GPU = {"zero_copy": "zero copy", "layered": "direct"}  # refused on a CPU
PAGE = (ROOT / "docs" / "gpu_todo.md").read_text(encoding="utf-8")
SCRIPT = (FOLDER / "run.sh").read_text(encoding="utf-8")


def load(path: Path):
    """A part as a module; its neighbours are found as when it is a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def beside(monkeypatch):
    """Parts import `common` from their folder; other tests do not see it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("common", None)


@pytest.fixture
def common(beside):
    return importlib.import_module("common")


def run_sh(*parts: str, out: Path, **given: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", FOLDER / "run.sh", *parts],
        capture_output=True,
        text=True,
        env=os.environ | {"OUT": str(out)} | given,
    )


def result_of(part: str, out: Path) -> dict | None:
    """What a part's report says, where it writes one."""
    with tarfile.open(out / "results.tar.gz") as packed:
        assert f"./{part}.log" in packed.getnames()
        if f"./{part}.json" in packed.getnames():
            return json.load(packed.extractfile(f"./{part}.json"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """As public ones: 128 experts, of which a token chooses eight."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("trace") / "t.csv"
    rows = [
        (DECODE, step, layer, rng.choice(128, 8, replace=False))
        for step, layer in itertools.product(range(128), range(2))
    ]
    write_trace(path, make_trace(rows, num_experts=128))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("part", TINY)
def test_a_part_runs_with_tiny_sizes(part, trace, tmp_path):
    done = run_sh(f"{part}=900", out=tmp_path, TINY="1", TRACE=str(trace))
    assert f"== {part}: exit code 0 " in done.stdout, done.stdout
    found = result_of(part, tmp_path)
    if found is not None and part != "serve":
        assert found["device"] == jax.devices()[0].device_kind
        wrong = {name: value for name, value in found.items() if "failed" in name}
        refused = ON_A_GPU.get(part, "nothing")
        assert all(refused in name for name in wrong), wrong


@pytest.mark.slow
def test_a_larger_model_is_trained_and_comes_back(tmp_path):
    given = {"TINY": "1", "RUN_DIR": str(tmp_path / "run")}
    done = run_sh("pretrain=900", "bring=900", out=tmp_path, **given)
    assert done.stdout.count(": exit code 0 ") == 2, done.stdout
    assert result_of("pretrain", tmp_path)["exit code of training"] == 0
    with tarfile.open(tmp_path / "model.000.00") as packed:
        assert "larger/model.safetensors" in packed.getnames()


def test_what_was_trained_comes_back_in_pieces(tmp_path):
    trained = tmp_path / "run" / "larger"
    trained.mkdir(parents=True)
    wanted = os.urandom(61 << 20)
    (trained / "weights").write_bytes(wanted)
    for at in ("0", "60"):
        done = run_sh("bring", out=tmp_path, RUN_DIR=str(trained.parent), FROM_MIB=at)
        assert "== bring: exit code 0 " in done.stdout, done.stdout
    pieces = sorted(tmp_path.glob("model.*"))
    # Of one call: files of 16 MiB, 64 together with the archive of logs.
    assert len(pieces) == 5 and pieces[0].stat().st_size <= 16 << 20
    joined = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=joined) as packed:
        assert packed.extractfile("larger/weights").read() == wanted


def test_bring_says_that_nothing_was_trained(tmp_path):
    done = run_sh("bring", out=tmp_path, RUN_DIR=str(tmp_path / "run"))
    assert "== bring: exit code 0 " not in done.stdout
    assert not [*tmp_path.glob("model.*")]


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_a_part_says_what_it_asks(path, beside, monkeypatch, capsys):
    module = load(path)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--out_dir" in shown
    assert module.__doc__.split()[:3] == shown.split("\n\n")[1].split()[:3]


def test_every_part_has_a_limit_and_a_command_and_is_documented():
    limits = dict(re.findall(r"\[(\w+)\]=(\d+)", SCRIPT))
    assert {path.stem for path in PARTS} <= {*limits}
    body = SCRIPT.partition("part() {")[2].partition("\n}")[0]
    for part, limit in limits.items():
        assert re.search(rf"\b{part}( \||\))", body), f"{part} has no command"
        row = re.search(rf"^\|.*\| [^|]*`{part}`[^|]*\| ([\d +]+) \|", PAGE, re.M)
        assert row and limit in row[1].split(" + "), f"{part}: {limit} s"


def test_sets_fit_their_calls():
    limits = dict(re.findall(r"\[(\w+)\]=(\d+)", SCRIPT))
    sets = dict(re.findall(r'\[(\w+)\]="([^"]+)"', SCRIPT))
    took = {
        name: sum(max(int(limits[p]) for p in group.split("+")) for group in it.split())
        for name, it in sets.items()
    }
    # Eight minutes a call; one lease is the first two, with a start and transfers.
    assert max(took.values()) <= 480 and took["first"] + took["second"] + 120 <= 900
    first, *others = took.items()
    said = ", ".join(f"`{name}` {seconds}" for name, seconds in others)
    said = f"`{first[0]}` takes {first[1]} s at most, {said}."
    assert said in " ".join(PAGE.split())


def test_the_page_names_folders_and_tests_that_exist():
    names = re.findall(r"(?<![\w/.])((?:tests|tools|configs)/[\w/.]*\w)", PAGE)
    assert "tools/gpu/run.sh" in names and "tests/papers/moe_prism" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("asked", [("nay",), ("host", "bits+nay=3"), ()])
def test_run_refuses_what_it_does_not_know(asked, tmp_path):
    done = run_sh(*asked, out=tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    start = "unknown part nay; known:" if asked else "no part given; known:"
    assert done.stderr.startswith(start)
    assert "zero_copy" in done.stderr


def test_a_report_is_there_after_every_result(common, tmp_path):
    report = common.Report("some", tmp_path)
    report.add("ms", [1.5, np.float32(2)])
    with report.attempt("this"):
        raise ValueError("no room")
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["ms"] == [1.5, 2]
    assert found["this: failed"] == "ValueError no room"
    assert found["device"] == jax.devices()[0].device_kind


def test_a_profile_counts_launches_time_and_gaps(common):
    class Event:
        def __init__(self, name, start_us, us):
            self.name, self.start_ns, self.duration_ns = name, 1e3 * start_us, 1e3 * us

    # Two steps of two kernels: 5 us apart, and the steps 500.
    events = [Event("a", 0, 10), Event("b", 15, 20), Event("a", 535, 10)]
    found = common._line([*events, Event("b", 550, 20)], steps=2, top=1)
    assert found["launches"] == 2 and found["busy_ms"] == pytest.approx(0.03)
    assert found["short_gaps_ms"] == pytest.approx(0.005)
    assert found["long_gaps_ms"] == pytest.approx(0.25)
    assert found["kernels"] == {"b": [20, 1]}


def test_a_profile_of_the_host_knows_its_threads(common):
    add = jax.jit(lambda x: x + 1)

    def steps():
        for _ in range(4):
            add(jnp.int32(1)).block_until_ready()

    found = common.profile(steps, 4, host=True)
    # This thread at least: tracing, dispatch, waiting. Others may only have marks.
    assert max(line["busy_ms"] for line in found.values()) > 0
    assert max(line["launches"] for line in found.values()) >= 1


def test_cases_take_turns_and_calls_are_timed(common):
    seen = []
    cases = {name: lambda n=name: seen.append(n) or 1.0 for name in "ab"}
    assert common.in_turn(cases, 2) == {"a": [1, 1], "b": [1, 1]}
    assert seen == ["a", "b", "a", "b"]
    add = jax.jit(lambda x: x + 1)
    assert 0 < common.call_us(lambda: add(jnp.int32(1)), 3) < 1e7
    some = [np.array([1.0, 3.0])]
    assert common.same(some, some) and common.apart(some, [some[0] + 2]) == 2
