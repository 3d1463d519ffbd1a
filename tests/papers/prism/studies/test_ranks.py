"""Published ranks: the reader, the assumed curves by hand, a whole entry."""

import json

import numpy as np
import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, tables
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.prism.studies.ranks import (
    METHODS,
    STUDY,
    Calls,
    RankSettings,
    derive,
)
from moe_edge.place.ranks import RANKED, rank_frequencies, ranks_folder, read_ranks
from tests.papers.prism.studies.test_patterns import write_counts

DOMAINS = ("a", "b")


def write_ranks(path, lists):
    tables = {d: {"per_layer_domain_preferred": by} for d, by in lists.items()}
    path.write_text(json.dumps({"model": "tiny", "domains": tables}))
    return path


def test_reader_keeps_layers_that_every_domain_lists_well(tmp_path):
    lists = {
        "a": {"0": [3, 1], "1": [0, 2], "2": [5, 6]},
        "b": {"0": [1, 2, 3], "1": [4], "2": [6, 7]},
    }
    ranks, layers = read_ranks(write_ranks(tmp_path / "r.json", lists), 8, DOMAINS)
    assert layers == (0, 2)  # layer 1 of b lists less than a quarter
    assert ranks == [[[3, 1], [5, 6]], [[1, 2, 3], [6, 7]]]


@pytest.mark.parametrize(
    "lists, message",
    [
        ({"a": {"0": [1, 1]}, "b": {"0": [1, 2]}}, "an expert twice"),
        ({"a": {"0": [1, 8]}, "b": {"0": [1, 2]}}, "expert 8, expected different"),
        ({"a": {"0": "12"}, "b": {"0": [1, 2]}}, "expected a list of experts"),
        ({"a": {"0": [1]}, "b": {"0": [1, 2]}}, "lists 2 experts in no layer"),
        ({"a": {"0": [1, 2]}}, "unknown domain 'b'"),
        ({"a": {"x": [1, 2]}, "b": {}}, "expected an object of lists by layer"),
    ],
)
def test_other_files_are_refused(tmp_path, lists, message):
    with pytest.raises(ConfigError, match=message):
        read_ranks(write_ranks(tmp_path / "r.json", lists), 8, DOMAINS)


def test_curves_by_hand():
    ranks = [[[2, 0]]]
    flat_E = rank_frequencies(ranks, 4, 0.8, "flat")[0, 0]
    np.testing.assert_allclose(flat_E, [0.4, 0.1, 0.4, 0.1])
    # 1, q, q^2, q^3 with (1 + q) / (1 + q + q^2 + q^3) = .8: q = .5.
    found_E = rank_frequencies(ranks, 4, 0.8, "geometric")[0, 0]
    np.testing.assert_allclose(found_E, [0.8 / 3, 0.1, 1.6 / 3, 0.1])


def test_calls_at_home_by_hand():
    share_NLE = np.array([[[0.7, 0.3, 0.0, 0.0]], [[0.0, 0.0, 0.4, 0.6]]])
    calls = Calls("tiny", "counts", share_NLE)
    assert calls.overlap() == 0.0
    assert calls.local("prism", 0.5) == 1.0
    assert calls.local("prism", 1.0) == 1.0


def test_entry_has_all_kinds_of_statistics(tmp_path):
    rng = np.random.default_rng(0)
    given = {"data_dir": str(tmp_path), "ranks_dir": str(tmp_path), "shares": (0.6,)}
    settings = RankSettings(counts="counts.jsonl", **given)
    write_counts(tmp_path / "counts.jsonl")
    for model, domains in zip(
        RANKED, (settings.qwen_domains, settings.deepseek_domains), strict=True
    ):
        lists = {d: {"0": rng.permutation(256)[:64].tolist()} for d in domains}
        write_ranks(tmp_path / model.file, lists)
    summary = run_study(find("prism_ranks"), settings, out_dir=str(tmp_path / "out"))
    entry = validate_entry(tmp_path / "out")
    overlaps = tables(entry["frames"])["overlaps"]
    assert set(zip(overlaps.model, overlaps.kind, strict=True)) == {
        *(("Mixtral-tiny", "counts"), ("Mixtral-tiny", "assumed tasks")),
        *((m.name, f"ranks, {c}") for m in RANKED for c in ("geometric", "flat")),
    }
    assert set(summary["numbers"]["spans"]) == {"counts", "ranks", "assumed tasks"}


def test_gains_are_points_of_prism_over_eplb():
    rows = Rows(STUDY.frames)
    for share, gain in ((0.4, 0.25), (0.5, 0.125)):
        for method in METHODS:
            local = 0.5 + gain * (method == "prism")
            rows("homes", "m", "ranks, flat", share, method, local=local)
    found = derive(tables(rows.stored()))
    assert list(found["gains"].points) == [25.0, 12.5] and found["middle"] == 0.5
    assert found["spans"] == {"ranks": {"low": 12.5, "high": 12.5}}


def test_ranks_that_are_not_there_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr("moe_edge.place.ranks.FOLDER", "no_such_package/data")
    with pytest.raises(ConfigError, match="pip install --no-deps moe-l2"):
        ranks_folder()
    with pytest.raises(FileNotFoundError, match="ranks_dir"):
        ranks_folder(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="share above 1/3"):
        RankSettings(shares=(0.25,))
