"""Usage of experts from counts: by hand, a whole entry, refusals."""

import json

import numpy as np
import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import tables
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.prism.studies.patterns import Usage, facts_of, read_usage

COUNTS = {
    ("code", 0): [50, 20, 20, 10, 0, 0, 0, 0],
    ("code", 1): [10, 10, 10, 10, 10, 10, 10, 10],
    ("prose", 0): [0, 0, 0, 0, 10, 20, 20, 50],
    ("prose", 1): [10, 10, 10, 10, 10, 10, 10, 10],
}


def write_counts(path, counts=COUNTS, model="Mixtral-tiny"):
    lines = []
    for top_k in (1, 2):
        for (domain, layer), each in counts.items():
            row = {"model": model, "domain": domain, "layer": layer, "top_k": top_k}
            row |= {
                "num_experts": 8,
                "tokens": sum(each) // top_k,
                "counts": each[:: (-1) ** top_k],
            }
            lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def test_usage_counts_all_chosen_experts(tmp_path):
    usage = read_usage(write_counts(tmp_path / "counts.jsonl"))["Mixtral-tiny"]
    assert (usage.domains, usage.layers) == (["code", "prose"], [0, 1])
    assert usage.share_NLE[0, 0, 0] == 0.5  # of top_k 2, not of the first choice


def test_facts_by_hand(tmp_path):
    usage = read_usage(write_counts(tmp_path / "counts.jsonl"))["Mixtral-tiny"]
    assert usage.favourites == 2
    np.testing.assert_allclose(usage.caught_NML()[0, :, 0], [0.7, 0.0])
    np.testing.assert_allclose(usage.apart_L(), [1.0, 0.0])
    facts = facts_of(usage)
    assert facts["own"] == pytest.approx((0.7 + 0.25) / 2)
    assert facts["another"] == pytest.approx(0.25 / 2)
    assert facts["most_entropy"] == 1.0
    bits = -(0.5 * np.log2(0.5) + 0.4 * np.log2(0.2) + 0.1 * np.log2(0.1))
    assert facts["least_entropy"] == pytest.approx(bits / 3)


def test_fewer_than_four_experts_have_one_favourite():
    usage = Usage(np.full((2, 1, 3), 1 / 3), ["a", "b"], [0])
    assert usage.favourites == 1
    np.testing.assert_allclose(usage.caught_NML(), np.full((2, 2, 1), 1 / 3))


def test_entry_has_the_assumed_tasks_beside(tmp_path):
    write_counts(tmp_path / "counts.jsonl")
    study = find("prism_fig2")
    settings = study.settings(data_dir=str(tmp_path), counts="counts.jsonl")
    run_study(study, settings, out_dir=str(tmp_path / "out"))
    entry = validate_entry(tmp_path / "out")
    usage, experts, layers = tables(entry["frames"]).values()
    assert list(usage.kind) == ["measured", "assumed tasks"]
    assert list(experts.share[experts.domain == "prose"]) == [
        *(0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.2, 0.5)
    ]
    assert layers.entropy[layers.layer == 1].tolist() == [1.0, 1.0]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "Counted layers: 2 of Mixtral-tiny" in page


def test_missing_counts_and_files_are_refused(tmp_path):
    some = {cell: counts for cell, counts in COUNTS.items() if cell != ("prose", 1)}
    path = write_counts(tmp_path / "counts.jsonl", some)
    with pytest.raises(ConfigError, match=r"lacks layers \[1\] of domain 'prose'"):
        read_usage(path)
    some = {cell: counts for cell, counts in COUNTS.items() if cell[0] == "code"}
    with pytest.raises(ConfigError, match="has 1 domains of 8 experts"):
        read_usage(write_counts(tmp_path / "counts.jsonl", some))
    study = find("prism_fig2")
    with pytest.raises(FileNotFoundError, match="name the folder of the data"):
        study.check(study.settings(counts="elsewhere.jsonl"))
