"""What no cluster can be is refused in one line, before anything starts."""

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_edge.cluster.modes import options_of
from moe_edge.cluster.run import run_cluster
from moe_edge.core.checks import CapacityError, ConfigError, OutputError, RequestError
from moe_edge.place.plan import Placement
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_checkpoints import hf_folder

FEW = "few 16 random bytes and more"


@pytest.mark.parametrize(
    "given, text",
    [
        ({"mode": "x"}, "unknown mode 'x'; known: od_moe, prism"),
        ({"kv_cache": "q4"}, "unknown kv_cache 'q4'; known: bfloat16, float32, q8_0"),
        ({"source": "disk"}, "unknown source of blocks 'disk'; known: host, network"),
        ({"methods": "optimal,best"}, "unknown method 'best'; known: eplb, "),
        (
            {"methods": ["optimal"]},
            "methods is .*, and the processes of a cluster know",
        ),
        (
            {"placer_options": {"optimal": {"x": 1}}},
            "placer optimal has no option 'x'; known: none",
        ),
        (
            {"placer_options": {"prism": {}}},
            "options are of prism, and the placers are",
        ),
        ({"servers": 0}, "servers must be a positive whole number, got 0"),
        ({"servers": 65}, "servers is 65, expected 1 to 64"),
        ({"max_batch": 0}, "max_batch must be a positive whole number, got 0"),
        ({"join_timeout_s": 0}, "join_timeout_s must be positive, got 0"),
        ({"period_s": -1}, "period_s must be 0 or more and finite, got -1"),
        ({"keep": 1.5}, r"keep must lie in \[0, 1\], got 1.5"),
        ({"hysteresis": 1}, "hysteresis is 1, expected 0 or more, below 1"),
        ({"link_mbps": 0}, "link_mbps must be positive, got 0"),
        ({"host_bytes_per_s": 0}, "host_bytes_per_s must be positive, got 0"),
        ({"prompts": None}, "give either --workload or --prompts, got neither"),
        ({"workload": "words"}, "give either --workload or --prompts, got both"),
        (
            {"prompts": None, "workload": "words,poems"},
            "unknown workload 'poems'; known: arithmetic, stories, tables, words",
        ),
        (
            {"prompts": None, "workload": "words,words"},
            "--workload names 2 task families, expected one for each of the 3 servers",
        ),
        ({"drill": "kill:1"}, "--drill is 'kill:1', expected KIND:WHO@TOKENS"),
        (
            {"drill": "maim:1@4"},
            "unknown drill 'maim'; known: accuse, kill, pause, stop",
        ),
        (
            {"drill": "kill:3@4"},
            "unknown process in --drill '3'; known: 0, 1, 2, scheduler",
        ),
        ({"drill": "kill:shadow@4"}, "unknown process in --drill 'shadow'"),
        ({"drill": "stop:scheduler@4"}, "stop:scheduler: only servers can be stopped"),
        (
            {"drill": "accuse:scheduler@4"},
            "accuse:scheduler: only servers can accuse others",
        ),
        ({"hung_s": 0.2}, "--hung_s is 0.2, expected 0.5 to 3600 seconds"),
        ({"hung_s": float("nan")}, "--hung_s is nan, expected 0.5 to 3600 seconds"),
        ({"process_id": 1}, "--process_id needs --coordinator HOST:PORT; give both"),
        (
            {"process_id": 4, "coordinator": "localhost:77"},
            r"--process_id is 4, expected 0 \(scheduler\) to 3",
        ),
        ({"coordinator": "here"}, "--coordinator is 'here', expected HOST:PORT"),
        ({"coordinator": "here:0"}, "'here:0', expected HOST:PORT with a port from 1"),
        ({"coordinator": "here:70000"}, "'here:70000', expected HOST:PORT"),
        (
            {"coordinator": "192.0.2.1:77"},
            "192.0.2.1:77 is reached over a network; .* the same --secret_file",
        ),
        (
            {"coordinator": "localhost:77", "link_mbps": 500},
            "--link_mbps slows links that the launcher makes itself",
        ),
        (
            {"mode": "od_moe", "workers": 4, "groups": 3},
            "--groups 3 does not divide --workers 4; groups are of equal size",
        ),
        (
            {"mode": "od_moe", "drill": "kill:worker4@4"},
            "known: main, scheduler, shadow, worker0, worker1, worker2",
        ),
        (
            {"workers": 2},
            "--workers is an option of mode od_moe, and the mode is prism; leave",
        ),
        (
            {"mode": "od_moe", "methods": "optimal"},
            "--methods is an option of mode prism, and the mode is od_moe; leave",
        ),
        ({"mode": "od_moe", "shadow": "q3"}, "unknown shadow 'q3'; known: bf16"),
        (
            {"mode": "od_moe", "load_bytes_per_s": "fast"},
            "'fast', expected a positive number or balanced",
        ),
    ],
)
def test_what_no_cluster_can_be_is_refused(prompts, given, text):
    with pytest.raises(ConfigError, match=text):
        options_of(**{"prompts": str(prompts)} | given)


def test_a_server_that_joins_needs_no_requests():
    where = {"coordinator": "localhost:77", "servers": 2}
    options = options_of(process_id=2, **where)
    assert not options.is_scheduler
    for own in ({"process_id": 0}, {}):
        with pytest.raises(ConfigError, match="got neither"):
            options_of(**own, **where)


def test_what_must_agree_is_what_servers_go_by(prompts):
    where = {"coordinator": "localhost:77", "servers": 2}
    mine = options_of(prompts=str(prompts), interval_s=2.0, **where)
    theirs = options_of(process_id=1, join_timeout_s=5.0, cores="0", **where)
    assert mine.shared == theirs.shared == json.loads(json.dumps(mine.shared))
    assert mine.shared != dataclasses.replace(mine, max_batch=2).shared


@pytest.fixture
def refused(tiny, prompts, tmp_path):
    """Runs a cluster that is to be refused; no folder is left."""

    def run(error, text, **given):
        given = {"servers": 2, "checkpoint": str(tiny)} | given
        if "workload" not in given:
            given.setdefault("prompts", str(prompts))
        with pytest.raises(error, match=text) as caught:
            run_cluster(out_dir=str(tmp_path / "o"), **given)
        assert getattr(caught.value, "exit_code", 2) == 2
        assert not (tmp_path / "o").exists()

    return run


def test_caches_that_heads_do_not_fill_are_refused(refused):
    text = "kv_cache q8_0 holds values in blocks of 32, which do not fill a k of"
    refused(ConfigError, text, kv_cache="q8_0")


def test_slots_that_do_not_fit_are_refused(refused):
    text = "--slots is '9', expected one number for each of the 2 servers"
    refused(ConfigError, text, slots="9")
    refused(ConfigError, "--slots is '9\\+9,9', expected one number", slots="9+9,9")
    text = "--slots 8,8 leave room for 14 blocks .* needs 16 .* add 2 slots, or servers"
    refused(CapacityError, text, slots="8,8")
    text = "a server with 1 slots cannot serve alone, which takes 2"
    refused(CapacityError, text, slots="25,1", methods="optimal,moe_infinity")


def test_prompts_that_cannot_be_served_are_refused(refused, tmp_path):
    path = tmp_path / "p.jsonl"
    refused(FileNotFoundError, "p.jsonl does not exist; check", prompts=str(path))
    for row, error, text in (
        ({"server": 2}, RequestError, "p.jsonl:1: 'server' is 2, expected 0 to 1"),
        ({"server": "a"}, RequestError, "'server' is 'a', expected 0 to 1"),
        ({"server": True}, RequestError, "'server' is True, expected 0 to 1"),
        ({"prompt": ""}, RequestError, "p.jsonl:1: the prompt is empty"),
        ({"prompt": "ab " * 90}, CapacityError, "exceeds the model's context of 128"),
    ):
        path.write_text(json.dumps({"id": "a", "prompt": "b"} | row))
        refused(error, text, prompts=str(path))


def test_placements_that_do_not_fit_are_refused(refused, tmp_path):
    stem = tmp_path / "p"
    refused(FileNotFoundError, "p.npy does not exist", placement=str(stem))
    gpu_NLE = np.zeros((2, 2, 8), np.int8)
    gpu_NLE[0, 0, :4] = -1
    slots = {"placement": str(stem), "slots": "14,18"}
    Placement(gpu_NLE[:1]).save(stem)
    text = r"has \(servers, layers, experts\) \(1, 2, 8\), .* ask for \(2, 2, 8\)"
    refused(ConfigError, text, **slots)
    Placement(gpu_NLE).save(stem)
    refused(
        CapacityError,
        "GPU 0 of server 1 is given 16 blocks, it holds 8",
        **(slots | {"slots": "14,9"}),
    )
    gpu_NLE[1, 0, 0] = -1
    Placement(gpu_NLE).save(stem)
    refused(CapacityError, "1 blocks are on no server, the first is block 0", **slots)
    for ending, text in ((".json", "{}"), (".json", "no JSON"), (".npy", "no array")):
        Placement(gpu_NLE).save(stem)
        Path(f"{stem}{ending}").write_text(text)
        refused(ConfigError, r"\bp\b.*", **slots)
    Path(f"{stem}.json").unlink()
    refused(FileNotFoundError, "p.json does not exist", **slots)


def test_secrets_that_are_none_are_refused(refused, tmp_path):
    path = tmp_path / "s"
    refused(ConfigError, "cannot read the secret file", secret_file=str(path))
    path.write_text(FEW)
    refused(ConfigError, "mode 644, open to others", secret_file=str(path))
    path.chmod(0o600)
    path.write_text("short")
    refused(ConfigError, "holds 5 bytes, expected at least 16", secret_file=str(path))


def test_a_coordinator_that_cannot_be_is_refused(refused, tmp_path):
    secret = tmp_path / "s"
    secret.write_text(FEW)
    secret.chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        text = f"--coordinator {where} cannot be listened on: Address already in use"
        refused(ConfigError, text, coordinator=where)
    text = "192.0.2.1:777 cannot be listened on: .*; name a free port of this machine"
    refused(ConfigError, text, coordinator="192.0.2.1:777", secret_file=str(secret))


def test_checkpoints_that_cannot_be_served_are_refused(refused, tmp_path):
    refused(ValueError, "none is not a folder", checkpoint=str(tmp_path / "none"))
    bare = write_tiny_checkpoint(tmp_path / "bare", with_tokenizer=False)
    refused(ValueError, "bare has no tokenizer.json", checkpoint=str(bare))
    dense = hf_folder(tmp_path / "dense", "qwen2_moe", mlp_only_layers=[0, 1, 2])
    refused(ValueError, "dense: every layer is dense; expected", checkpoint=str(dense))


def test_cores_that_are_none_are_refused(refused):
    refused(ConfigError, "3", cores="0,0")
    refused(ConfigError, "4711", cores="0,0,4711")


def test_a_folder_that_is_read_is_not_written(tiny, prompts):
    with pytest.raises(OutputError, match="overlaps the source"):
        run_cluster(
            out_dir=str(tiny),
            checkpoint=str(tiny),
            prompts=str(prompts),
            servers=2,
            overwrite=True,
        )
    assert (tiny / "config.json").is_file()


def test_dry_run_checks_all_without_loading_jax(tiny, prompts):
    """Refusals answer within a second because of that."""
    text = (
        "import sys; from moe_edge.cluster.run import run_cluster; "
        f"print(run_cluster(out_dir='x', checkpoint={str(tiny)!r}, dry_run=True, "
        f"prompts={str(prompts)!r})['processes']); "
        "print([name for name in ('jax', 'flax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[0, 1, 2, 3]", "[]"]
