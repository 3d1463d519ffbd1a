"""What a load consists of."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    block_tokens,
    check_floors,
    in_whole_experts,
    offered_requests,
    parse_floors,
)


@pytest.fixture
def data(tmp_path):
    """A data folder with a trace of each kind."""
    (tmp_path / "traces").mkdir()
    head = "request_id,arrival_s,input_tokens,output_tokens\n"
    rows = "0,0.5,40,8\n1,1.0,1000,2000\n2,4.0,7,3\n"
    for name in ("azure_conv", "mooncake_conversation"):
        (tmp_path / "traces" / f"{name}.csv").write_text(head + rows)
    blocks = [json.dumps({"prefix_block_ids": each}) for each in ([3], [3, 4], [9])]
    path = tmp_path / "traces" / "mooncake_conversation.jsonl"
    path.write_text("\n".join(blocks) + "\n")
    return tmp_path


def test_poisson_has_its_rate_lengths_and_floors():
    options = LoadOptions(poisson=20.0, duration_s=50.0, floors="8:1,16:3", seed=1)
    requests = offered_requests(options, 4096)
    assert 900 < len(requests) < 1100 and requests[-1].arrival_s < 50
    assert [each.id for each in requests] == list(range(len(requests)))
    times = [each.arrival_s for each in requests]
    assert times == sorted(times)
    lengths = np.array([(each.prompt_tokens, each.new_tokens) for each in requests])
    np.testing.assert_allclose(lengths.mean(0), (128, 64), rtol=0.1)
    floors = [each.floor for each in requests]
    assert set(floors) == {8, 16}
    assert floors.count(16) / len(floors) == pytest.approx(0.75, abs=0.05)
    assert offered_requests(options, 4096) == requests
    other = LoadOptions(poisson=20.0, duration_s=50.0, seed=2)
    others = offered_requests(other, 4096)
    assert others != requests and others[0].floor is None
    assert len(offered_requests(LoadOptions(poisson=2.0), 4096)) > 60  # of 60 s


def test_lengths_are_scaled_and_cut_to_the_context(data):
    options = {"trace": "azure_conv", "data_dir": str(data)}
    times = offered_requests(LoadOptions(**options, speed=2.0), 4096)
    assert [each.arrival_s for each in times] == [0.25, 0.5, 2.0]
    sizes = [(each.prompt_tokens, each.new_tokens) for each in times]
    assert sizes == [(40, 8), (1000, 2000), (7, 3)]
    short = offered_requests(LoadOptions(**options, length_scale=0.1), 64)
    sizes = [(each.prompt_tokens, each.new_tokens) for each in short]
    assert sizes == [(4, 1), (32, 32), (1, 1)]  # 100 and 200 tokens: cut
    first = offered_requests(LoadOptions(**options, duration_s=1.0, speed=1.25), 64)
    assert [each.id for each in first] == [0, 1]


def test_blocks_of_a_trace_are_scaled_with_its_lengths(data):
    options = LoadOptions(trace="mooncake", data_dir=str(data), length_scale=0.05)
    requests = offered_requests(options, 4096)
    assert [each.blocks for each in requests] == [(3,), (3, 4), (9,)]
    assert block_tokens(options) == 26


def test_floors_are_parsed():
    assert parse_floors(None) == {} and parse_floors("8") == {8: 1.0}
    assert parse_floors("8:1,32:3") == {8: 0.25, 32: 0.75}
    check_floors("8:1,32:3", 32)
    with pytest.raises(ConfigError, match="--floors asks for K 32, the model's is 31"):
        check_floors("8:1,32:3", 31)


@pytest.mark.parametrize("text", ["8:0", "x:1", "8:1,8:2", "0:1", "8:", "", "8:inf"])
def test_floors_that_are_none_are_refused(text):
    part = text.split(",")[-1]
    with pytest.raises(ConfigError, match=f"floors '{text}': '{part}' is no K:weight"):
        parse_floors(text)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "give either --poisson or --trace, got neither"),
        ({"poisson": 1.0, "trace": "azure_conv"}, "got both"),
        ({"poisson": 0.0}, "poisson must be positive, got 0.0"),
        ({"poisson": 1.0, "duration_s": -1.0}, "duration_s must be positive, got -1"),
        ({"poisson": 1.0, "speed": 2.0}, "speed 2 is of a trace"),
        ({"poisson": 1.0, "length_scale": 0.0}, "length_scale must be positive, got 0"),
        ({"poisson": 1.0, "prompt_tokens": 0}, "prompt_tokens must be a positive .* 0"),
        ({"trace": "tool"}, "unknown request trace 'tool'; known: azure_code, azure_c"),
        ({"trace": "mooncake"}, "request trace mooncake needs --data_dir"),
        ({"poisson": 1.0, "floors": "a"}, "floors 'a': 'a' is no K:weight"),
    ],
)
def test_loads_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options).check()


def test_a_time_without_requests_is_refused(data):
    with pytest.raises(RequestError, match="within 1e-06 s at 0.001 a second; ask for"):
        offered_requests(LoadOptions(poisson=0.001, duration_s=1e-6), 64)
    options = {"trace": "azure_conv", "data_dir": str(data), "duration_s": 0.25}
    with pytest.raises(RequestError, match="comes within 0.25 s; the first .* 0.5 s"):
        offered_requests(LoadOptions(**options), 64)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}\n{}\n{}\n", ":1: prefix_block_ids is None, expected whole numbers"),
        ('{"prefix_block_ids": [1]}\n', "has 1 requests, the trace beside it 3"),
    ],
)
def test_blocks_that_are_none_are_refused(data, text, message):
    (data / "traces" / "mooncake_conversation.jsonl").write_text(text)
    with pytest.raises(RequestError, match=message):
        offered_requests(LoadOptions(trace="mooncake", data_dir=str(data)), 64)


@pytest.mark.parametrize(
    ("floor", "whole"), [(1, 1), (4, 1), (5, 2), (32, 8), (None, None)]
)
def test_floors_in_sub_experts_become_the_next_whole_experts(floor, whole):
    request = Offered(3, 0.5, 7, 9, floor, (1,))
    assert in_whole_experts([request], 4) == [Offered(3, 0.5, 7, 9, whole, (1,))]
    assert in_whole_experts([request], 1) == [request]
