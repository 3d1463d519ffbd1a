"""Loads by the script: every target, and what it refuses."""

import json

import pytest

from tests.support.completions_server import running_server
from tests.support.serving import COSTS

KEYS = [
    *("requests", "outcomes", "throughput_req_s", "output_tokens_per_s", "ttft_ms"),
    *("tpot_ms", "e2e_ms", "slo_attainment", "floor_violations", "mean_k"),
    *("late_ms_p99", "decisions_equal", "slo_ttft_ms", "slo_tpot_ms", "out_dir"),
]
POISSON = ["--poisson", 50, "--duration_s", 0.2, "--seed", 3]


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"step_costs": COSTS.to_json()}))
    return path


def test_computed_load_and_its_replay(run_script, tmp_path, costs):
    flags = ["--target", "computed", "--costs", costs, "--policy", "qos", *POISSON]
    done = run_script("load", *flags, "--decisions", "o/d.jsonl", "--out_dir", "o")
    assert list(done.summary) == KEYS and done.summary["decisions_equal"] is True
    assert done.summary["late_ms_p99"] is None
    served = f"{100 * done.summary['slo_attainment']:.0f} % of the requests had their "
    served += "first token within 500 ms and then one every 20 ms (--slo_ttft_ms, "
    assert f"\n{served}--slo_tpot_ms)\n" in done.stdout
    assert f"\nuntil the first token   {done.summary['ttft_ms']['mean']:10.1f} " in (
        done.stdout
    )
    stored = json.loads((tmp_path / "o" / "load.json").read_text())
    assert stored == {"target": "computed"} | {
        k: done.summary[k] for k in KEYS if k != "out_dir"
    }
    lines = (tmp_path / "o" / "requests.csv").read_text().splitlines()
    assert len(lines) == done.summary["requests"] + 1
    again = run_script(
        *("load", "--target", "replay", "--decisions", tmp_path / "o" / "d.jsonl"),
        *("--out_dir", "p"),
    ).summary
    assert again["decisions_equal"] is True
    assert again["outcomes"] == done.summary["outcomes"]
    assert again["mean_k"] == done.summary["mean_k"]


def test_decisions_that_differ_are_told(run_script, tmp_path, costs):
    flags = ["--target", "computed", "--costs", costs, "--floors", "4,32", *POISSON]
    run_script("load", *flags, "--decisions", "d.jsonl", "--out_dir", "o")
    path = tmp_path / "d.jsonl"
    path.write_text(path.read_text().replace('"continuous"', '"continuous_one_k"'))
    done = run_script("load", "--target", "replay", "--decisions", path)
    assert done.summary["decisions_equal"] is False
    assert "another policy" in done.stdout


def test_options_of_serving_come_from_gin_too(run_script, costs):
    flags = ["--target", "computed", *POISSON, "--gin_param"]
    given = ["serving.policy = 'vip'", "--gin_param", f"serving.costs = '{costs}'"]
    assert "'vip'; known: continuous" in run_script("load", *flags, *given).error
    done = run_script("load", *flags, *given, "--policy", "fifo")  # a flag is nearer
    assert done.summary["decisions_equal"] is True


def test_an_engine_in_process(run_script, tmp_path, tiny):
    flags = ["--target", "engine", "--checkpoint", tiny, "--prefill_chunk", 16]
    sizes = ["--max_batch", 2, "--max_context", 64, "--prompt_rows", 2]
    flags = [*flags, *sizes, "--floors", "1,2", "--length_scale", 0.1, *POISSON]
    done = run_script("load", *flags, "--decisions", "d.jsonl", "--out_dir", "o")
    assert list(done.summary) == KEYS and done.summary["decisions_equal"] is True
    assert done.summary["outcomes"] == {"finished": done.summary["requests"]}
    assert done.summary["floor_violations"] == 0 and done.summary["late_ms_p99"] >= 0
    made = json.loads((tmp_path / "d.jsonl").read_text().splitlines()[0])["loop"]
    assert made["own_k"] == 2 and made["options"]["max_batch"] == 2


def test_a_server(run_script):
    with running_server() as (url, _):
        done = run_script("load", "--target", url, *POISSON, "--floors", "8:1,16:1")
        assert list(done.summary) == KEYS and done.summary["mean_k"] == 12
        assert done.summary["outcomes"] == {"finished": done.summary["requests"]}


def test_a_trace_with_shared_beginnings(run_script, tmp_path):
    (tmp_path / "data" / "traces").mkdir(parents=True)
    stem = tmp_path / "data" / "traces" / "mooncake_conversation"
    head = "request_id,arrival_s,input_tokens,output_tokens\n"
    stem.with_suffix(".csv").write_text(head + "0,0.0,900,2\n1,0.1,900,2\n")
    blocks = '{"prefix_block_ids": [0, %d]}\n'
    stem.with_suffix(".jsonl").write_text(blocks % 1 + blocks % 2)
    flags = ["--trace", "mooncake", "--data_dir", "data", "--length_scale", 0.05]
    with running_server() as (url, server):
        run_script("load", "--target", url, *flags, "--speed", 10)
    first, second = sorted(body["prompt"] for body in server.bodies)
    assert first[:26] == second[:26] and first != second and len(first) == 45


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "no value for --target"),
        (["--target", "x"], "--target 'x': expected a URL such as http://127.0.0.1:80"),
        (["--target", "ftp://x", *POISSON], "URL 'ftp://x': expected such as http"),
        (["--target", "engine"], "give either --poisson or --trace, got neither"),
        (["--target", "replay"], "--target replay needs --decisions, a file of a load"),
        (
            ["--target", "replay", "--decisions", "d", "--poisson", 1],
            "--target replay has its requests from --decisions; leave out --poisson",
        ),
        (["--target", "replay", "--decisions", "d"], "--decisions d does not exist"),
        (
            ["--target", "replay", "--decisions", "d", "--policy", "fifo"],
            "--policy is in the file of --decisions; leave it out",
        ),
        (
            ["--target", "engine", "--trace", "x"],
            "unknown request trace 'x'; known: az",
        ),
        (["--target", "engine", *POISSON, "--floors", "8:x"], "floors '8:x': '8:x' is"),
        (
            ["--target", "engine", *POISSON, "--policy", "x"],
            "unknown scheduling policy",
        ),
        (["--target", "computed", *POISSON], "--target computed needs --costs"),
        (
            ["--target", "computed", *POISSON, "--costs", "c"],
            "--costs c does not exist",
        ),
        (
            ["--target", "http://127.0.0.1:9", *POISSON, "--decisions", "d"],
            "--decisions are made in the server of a URL",
        ),
        (
            ["--target", "http://127.0.0.1:9", *POISSON, "--max_batch", 4],
            "--max_batch is an option of the server behind a URL; give it to moe-",
        ),
        (
            ["--target", "http://127.0.0.1:9", *POISSON, "--api_key_file", "k"],
            "--api_key_file k does not exist",
        ),
        (
            ["--target", "http://127.0.0.1:9", *POISSON],
            "no server answers at http://12",
        ),
        (
            ["--target", "engine", *POISSON, "--decisions", "no/d"],
            "output file no/d: folder no does not exist",
        ),
        (
            ["--target", "engine", *POISSON, "--slo_ttft_ms", 0],
            "slo_ttft_ms must be pos",
        ),
        (["--target", "engine", *POISSON, "--checkpoint", "nowhere"], "nowhere"),
        (
            ["--target", "engine", *POISSON, "--weights", "mapped", "--dry_run"],
            "default_model is not in our format and holds no expert records to map",
        ),
        (
            ["--target", "engine", *POISSON, "--activations", "int8", "--dry_run"],
            "int8 meet weights in interleaved blocks",
        ),
    ],
)
def test_bad_input_is_one_line(run_script, flags, message):
    assert message in run_script("load", *flags).error


@pytest.mark.parametrize("key", [b"two words", b"a\nb", b"", b"\xff\xfe"])
def test_a_key_that_no_header_carries_is_one_line(run_script, tmp_path, key):
    (tmp_path / "key").write_bytes(key)
    flags = ["--target", "http://127.0.0.1:9", "--api_key_file", "key", *POISSON]
    message = "--api_key_file key holds no key: expected printable ASCII"
    assert message in run_script("load", *flags).error


def test_dry_runs_serve_nothing(run_script, tiny, costs):
    for target in (
        ["http://127.0.0.1:9"],
        ["engine", "--checkpoint", tiny],
        ["computed", "--costs", costs],
    ):
        done = run_script("load", "--target", *target, *POISSON, "--dry_run")
        assert done.summary["dry_run"] and done.summary["target"] == target[0]
