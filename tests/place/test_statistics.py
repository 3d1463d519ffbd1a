"""Statistics from counts files."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.statistics import read_statistics

ROW = {
    "model": "m",
    "domain": "a",
    "layer": 0,
    "num_experts": 3,
    "top_k": 2,
    "tokens": 10,
    "counts": [10, 6, 4],
}


def counts_file(tmp_path, *changes, text=None):
    path = tmp_path / "counts.jsonl"
    lines = [json.dumps(ROW | change) for change in changes]
    path.write_text("\n".join(lines) if text is None else text)
    return path


def domains(tmp_path, **extra):
    return counts_file(
        tmp_path,
        {"layer": 4},
        {"layer": 0, "tokens": 16, "counts": [1, 15, 16]},
        {"domain": "b", "tokens": 2, "counts": [1, 1, 2]},
        {"domain": "b", "layer": 4, "tokens": 4, "counts": [2, 2, 4]},
        *([extra] if extra else []),
    )


def test_read_statistics_rows_are_normalised_per_server_and_layer(tmp_path):
    stats = read_statistics(domains(tmp_path), ["b", "a", "a"])
    assert stats.layers == (0, 4)
    assert (stats.model, stats.top_k) == ("m", 2)
    assert stats.frequency_NLE.shape == (3, 2, 3)
    np.testing.assert_allclose(stats.frequency_NLE.sum(axis=-1), 1.0)
    np.testing.assert_allclose(
        stats.frequency_NLE[1], [[1 / 32, 15 / 32, 0.5], [0.5, 0.3, 0.2]]
    )


def test_read_statistics_several_models_need_a_choice(tmp_path):
    path = domains(tmp_path, model="other", tokens=2, counts=[2, 1, 1])
    with pytest.raises(ConfigError, match="several: m, other; choose with --model"):
        read_statistics(path, ["a"])
    assert read_statistics(path, ["a"], model="m").layers == (0, 4)
    assert read_statistics(path, ["a"], model="other").layers == (0,)
    with pytest.raises(ConfigError, match="unknown model 'x' in .*known: m, other"):
        read_statistics(path, ["a"], model="x")


def test_read_statistics_several_top_k_need_a_choice(tmp_path):
    path = domains(tmp_path, top_k=1, tokens=20)
    with pytest.raises(ConfigError, match="several: 1, 2; choose with --top_k"):
        read_statistics(path, ["a"])
    assert read_statistics(path, ["a"], top_k=1).layers == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"counts": [float("nan"), 1, 1]},
            ":1 is not valid JSON: NaN is no JSON number",
        ),
        ({"counts": [1, -2, 1]}, ":1: count of expert 1 is -2"),
        ({"counts": [0, 0, 0]}, ":1: counts sum to 0, expected 20: 10 tokens with 2"),
        ({"counts": [10, 6, 3]}, ":1: counts sum to 19, expected 20: 10 tokens"),
        ({"tokens": 11}, ":1: counts sum to 20, expected 22: 11 tokens with 2"),
        ({"counts": [10, 6.5, 3.5]}, ":1: count of expert 1 is 6.5, expected a whole"),
        ({"counts": [10.0, 6, 4]}, ":1: count of expert 0 is 10.0, expected a whole"),
        (
            {"counts": [11, 5, 4]},
            "expert 0 is 11, expected a whole number from 0 to 10",
        ),
        ({"tokens": 10.0}, ":1: tokens is 10.0, expected a whole number from 1"),
        ({"model": None}, ":1: model is None, expected a text"),
        ({"domain": 7}, ":1: domain is 7, expected a text"),
        ({"counts": [1, 2]}, ":1 has counts of 2, expected 3"),
        ({"counts": "many"}, ":1 has counts of str"),
        ({"counts": [1, 2, "3"]}, "count of expert 2 is '3'"),
        ({"layer": "first"}, ":1: layer is 'first'"),
        ({"layer": -1}, ":1: layer is -1, expected a whole number from 0"),
        ({"counts": [1, 10**400, 1]}, ":1 is not valid JSON: a number has too"),
        ({"layer": 2**64}, ":1: layer is 18446744073709551616, expected a whole num"),
        ({"top_k": 0}, ":1: top_k is 0, expected a whole number from 1"),
    ],
)
def test_read_statistics_bad_row_is_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read_statistics(counts_file(tmp_path, change), ["a"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", ":1 is not valid JSON"),
        ('{"layer": 1}', "lacks model, domain"),
        ("\n", "no counts"),
    ],
)
def test_read_statistics_bad_file_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_statistics(counts_file(tmp_path, text=text), ["a"])


def test_read_statistics_unknown_domain_lists_the_known(tmp_path):
    with pytest.raises(ConfigError, match="unknown domain 'c'; known: a, b"):
        read_statistics(domains(tmp_path), ["a", "c"])


def test_read_statistics_missing_layer_is_named(tmp_path):
    path = domains(tmp_path, layer=9)
    with pytest.raises(ConfigError, match=r"lacks layers \[9\] of domain 'b'"):
        read_statistics(path, ["a", "b"])


def test_read_statistics_layer_given_twice_is_refused(tmp_path):
    path = domains(tmp_path, layer=4)
    with pytest.raises(ConfigError, match="layer 4 of domain 'a' twice"):
        read_statistics(path, ["a", "b"])
