import gzip
import time

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.workload.trace_reader import read_trace
from tests.support.traces import PUBLIC_HEAD, ROUTING

OURS_HEAD = (
    "# num_experts=8 top_k=2\n"
    "request,phase,step,layer,rank,expert,weight,hit,bytes,wait_s\n"
)


def write(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_read_public_trace(tmp_path, name):
    lines = "0,0,0,1,0,5,0.75\n0,0,0,1,1,2,0.25\n0,1,1,0,0,7,0.5\n0,1,1,0,1,0,0.5\n"
    trace = read_trace(write(tmp_path, PUBLIC_HEAD + lines, name), num_experts=8)
    assert (trace.num_experts, trace.top_k, trace.num_layers) == (8, 2, 2)
    assert trace.ids_TK.tolist() == [[5, 2], [7, 0]]
    assert trace.weights_TK.tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert trace.phase.tolist() == [0, 1]
    assert trace.hit_TK is None and trace.scores_TE is None


def test_read_public_trace_turns_follow_each_other(tmp_path):
    lines = "0,0,0,0,0,1,1\n0,1,1,0,0,2,1\n1,0,0,0,0,3,1\n1,1,1,0,0,4,1\n"
    trace = read_trace(write(tmp_path, PUBLIC_HEAD + lines), num_experts=8)
    assert trace.step.tolist() == [0, 1, 2, 3]
    assert trace.request.tolist() == [0, 0, 1, 1]


def test_read_our_trace_short_tokens_and_costs(tmp_path):
    lines = "3,1,4,0,0,5,1,1,0,0\n6,1,4,0,0,7,0.5,0,64,0.125\n6,1,4,0,1,5,0.5,1,0,0\n"
    trace = read_trace(write(tmp_path, OURS_HEAD + lines))
    assert trace.request.tolist() == [3, 6]
    assert trace.ids_TK.tolist() == [[5, -1], [7, 5]]
    assert trace.hit_TK.tolist() == [[True, False], [False, True]]
    assert trace.bytes_TK.tolist() == [[0, 0], [64, 0]]
    assert trace.wait_s_TK[1, 0] == 0.125
    assert trace.bounds.tolist() == [0, 2]


LINE = "0,1,0,0,0,1,1\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        (PUBLIC_HEAD, "is empty: no line after the column names"),
        ("turn,phase,step\n0,1,2\n", "lacks the columns layer, rank, expert, weight"),
        ("phase,step,layer,rank,expert,weight\n1\n", "lacks the columns request;"),
        (PUBLIC_HEAD + "0,1,0,0,0,x,1\n", "could not convert string 'x'"),
        (PUBLIC_HEAD + "0,1,0,0,0,1\n", "6 values a line, expected 7: turn, phase"),
        (PUBLIC_HEAD + LINE + "0,1,1,0,0\n", "number of columns changed"),
        (PUBLIC_HEAD + "0,1,0,0,0,1,nan\n", "row 0: weight is nan"),
        (PUBLIC_HEAD + LINE + "0,1,1,0,0,8,1\n", "row 1: expert 8, .* in 0..7; check"),
        (PUBLIC_HEAD + "0,1,0,0,0,-1,1\n", "row 0: expert -1, .* in 0..7"),
        (PUBLIC_HEAD + "0,1,0,0.5,0,1,1\n", "row 0: layer 0.5, expected a whole"),
        (PUBLIC_HEAD + "0,2,0,0,0,1,1\n", "row 0: phase 2, .* in 0..1"),
        (PUBLIC_HEAD + "0,1,0,0,1,1,1\n", r"row 0: rank 1 of .* ranks 0\.\.1"),
        (PUBLIC_HEAD + LINE + "0,1,0,0,2,2,1\n", r"row 1: rank 2 of .* ranks 0\.\.2"),
        (PUBLIC_HEAD + LINE + "0,1,1,0,1,2,1\n", "row 1: rank 1 of request 0, phase 1"),
        (
            PUBLIC_HEAD + LINE + "0,1,0,0,1,2,1\n0,1,1,0,0,2,1\n",
            r"row 2: rank 0 of request 0, phase 1, step 1, layer 0; .* ranks 0\.\.1",
        ),
        (
            PUBLIC_HEAD + LINE + "0,1,0,0,1,1,1\n",
            r"row 0: the token's experts \[1, 1\]",
        ),
        (OURS_HEAD.replace("=8", "=0"), "header line '# num_experts=0 top_k=2'"),
        (
            OURS_HEAD.replace("=8", f"={10**12}"),
            "num_experts=1000000000000 .* 1 to 1048",
        ),
        (
            OURS_HEAD.replace("=8", "=" + "8" * 5000),
            "# num_experts=888.*from 1 to 10485",
        ),
        (OURS_HEAD.replace("=2", f"={10**12}"), "top_k=1000000000000.* 1 to 1048576"),
        ("# hello\n" + PUBLIC_HEAD + LINE, "header line '# hello', expected"),
        (
            PUBLIC_HEAD + 2 * (LINE + "0,1,0,0,1,2,1\n"),
            "row 2: request 0, phase 1, step 0, layer 0 comes twice; expected each tok",
        ),
        (
            OURS_HEAD + 2 * "0,1,0,0,0,1,1,1,0,0\n" + "0,1,0,0,1,2,1,1,0,0\n",
            "row 1: request 0, phase 1, step 0, layer 0 comes twice",
        ),
        (
            OURS_HEAD + "0,1,0,0,0,1,1,0,-64,0\n0,1,0,0,1,2,1,1,0,0\n",
            r"row 0: bytes -64, expected a whole number in 0\.\.",
        ),
        (
            OURS_HEAD + "0,1,0,0,0,1,1,0,6.5,0\n0,1,0,0,1,2,1,1,0,0\n",
            "row 0: bytes 6.5, expected a whole number",
        ),
        (
            OURS_HEAD + "0,1,0,0,0,1,1,2,64,0\n0,1,0,0,1,2,1,1,0,0\n",
            r"row 0: hit 2, expected a whole number in 0\.\.1",
        ),
        (
            OURS_HEAD + "0,1,0,0,0,1,1,1,0,0\n0,1,0,0,1,2,1,0,64,-1\n",
            "row 1: wait_s is -1, expected 0 or more",
        ),
        (
            OURS_HEAD.replace("top_k=2", "top_k=3")
            + "0,1,0,0,0,1,1,1,0,0\n0,1,0,0,1,2,1,1,0,0\n",
            "says top_k=3, but no token has more than 2 experts; correct the header",
        ),
        (
            OURS_HEAD.replace("top_k=2", "top_k=9") + "0,1,0,0,0,1,1,1,0,0\n",
            "top_k is 9, expected at most the 8 experts",
        ),
        (
            OURS_HEAD + "".join(f"0,1,0,0,{r},{r},1,1,0,0\n" for r in range(3)),
            r"row 2: rank 2 of .* ranks 0\.\.1",
        ),
    ],
)
def test_read_trace_rejects(tmp_path, text, message):
    given = None if text.startswith("# num") else 8
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, text), given)


def test_read_trace_rejects_what_is_no_gzip(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_text(PUBLIC_HEAD + LINE)
    with pytest.raises(ConfigError, match="t.csv.gz: it is no gzip file"):
        read_trace(path, 8)
    path.write_bytes(gzip.compress((PUBLIC_HEAD + LINE).encode())[:-9])
    with pytest.raises(ConfigError, match="is a damaged gzip file"):
        read_trace(path, 8)
    path.write_bytes(gzip.compress(b"\xff\xfe"))
    with pytest.raises(ConfigError, match="is no text"):
        read_trace(path, 8)


def test_read_trace_number_of_experts_must_be_known_and_agree(tmp_path):
    public = write(tmp_path, PUBLIC_HEAD + LINE)
    with pytest.raises(ConfigError, match="how many experts .* --num_experts"):
        read_trace(public)
    with pytest.raises(ConfigError, match="num_experts must be a positive whole"):
        read_trace(public, 0)
    ours = write(tmp_path, OURS_HEAD + "0,1,0,0,0,1,1,1,0,0\n", "ours.csv")
    with pytest.raises(ConfigError, match="says num_experts=8, --num_experts says 9"):
        read_trace(ours, 9)


def test_read_qwen3_trace_is_complete_and_fast():
    path = ROUTING / "trace_qwen3_30b_a3b.csv.gz"
    if not path.is_file():
        pytest.skip(f"needs {path} (MOE_EDGE_SHARED names the shared folder)")
    start_s = time.process_time()
    trace = read_trace(path, 128)
    assert time.process_time() - start_s < 1
    assert (trace.num_layers, trace.top_k) == (48, 6)
    assert (trace.phase == 1).sum() == 128 * 48
    # The last layer of a prefill is computed for its last token only.
    assert (trace.phase == 0).sum() == 28 * 47 + 1
    assert np.abs(trace.weights_TK.sum(axis=1) - 1).max() < 1e-4
