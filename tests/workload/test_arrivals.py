import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.workload.arrivals import (
    TRACES,
    poisson_servers,
    read_arrivals,
    trace_path,
    trace_requests,
)

HEAD = "request_id,arrival_s,input_tokens,output_tokens\n"


def write(tmp_path, body, head=HEAD):
    path = tmp_path / "t.csv"
    path.write_text(head + body)
    return path


def test_poisson_gaps_have_the_stated_mean_and_spread():
    gaps = np.diff(poisson_servers(10.0, 1, 20_000)[0], prepend=0.0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(10, rel=0.03)
    assert gaps.std() == pytest.approx(10, rel=0.03)


def test_servers_have_their_own_arrivals():
    first, second = poisson_servers([1.0, 100.0], 2, 50, seed=3)
    assert second[-1] > 10 * first[-1]
    assert (poisson_servers(1.0, 2, 50, seed=3)[0] == first).all()


def test_trace_requests_keep_times_and_lengths(tmp_path):
    path = write(tmp_path, "7,0.0,10,3\n8,2.0,900,4\n9,2.0,5,6\n")
    rows = trace_requests(path, ["a", "b"], speed=2.0, most_tokens=100, seed=1)
    assert [r.arrival_s for r in rows] == [0.0, 1.0, 1.0]
    assert [(r.input_tokens, r.output_tokens) for r in rows] == [
        (10, 3),
        (100, 4),
        (5, 6),
    ]
    assert all(r.domain == "ab"[r.server] for r in rows)
    assert len(trace_requests(path, ["a"], count=2)) == 2
    with pytest.raises(RequestError, match="has [0-9]+ requests, 99 were asked for"):
        trace_requests(path, ["a"], count=99)


@pytest.mark.parametrize(
    "body, message",
    [
        ("0,1.0,2,3\n1,0.5,2,3\n", "out of order: request 1 arrives at 0.5 s, the one"),
        ("0,-1.0,2,3\n", "begins at -1.0 s, below 0"),
        ("0,0.0,2,0\n", "request 0: 2 input and 0 output tokens"),
        ("0,0.0,2.5,1\n", "2.5 input"),
        ("0,soon,2,3\n", "line 2: could not convert string to float: 'soon'"),
        ("0,nan,2,3\n", "no finite number"),
        ("", "has no request"),
    ],
)
def test_bad_traces_are_refused(tmp_path, body, message):
    with pytest.raises(RequestError, match=message):
        read_arrivals(write(tmp_path, body))


def test_other_bad_input_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no column input_tokens, output_tokens"):
        read_arrivals(write(tmp_path, "", "arrival_s\n"))
    with pytest.raises(ConfigError, match="interval_s must be positive, got -2"):
        poisson_servers(-2, 1, 3)
    with pytest.raises(ConfigError, match="interval_s has 1 numbers for 2 servers"):
        poisson_servers([1.0], 2, 3)
    with pytest.raises(ConfigError, match="unknown request trace 'x'; known: azure"):
        trace_path("x", "/")
    with pytest.raises(ConfigError, match="azure_conv needs --data_dir"):
        trace_path("azure_conv", None)
    with pytest.raises(ConfigError, match="trace speed must be positive, got 0"):
        trace_requests(write(tmp_path, "0,0,1,1\n"), ["a"], speed=0)


@pytest.mark.parametrize("name", TRACES)
def test_public_traces_are_read(name, request):
    path = request.config.rootpath.parent / "shared" / "data" / TRACES[name]
    if not path.exists():
        pytest.skip(f"no data folder: {path} is not there")
    assert len(read_arrivals(path)) > 5000
