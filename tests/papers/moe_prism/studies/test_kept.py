"""Measured points on disk: what is read again, and what is not."""

from types import SimpleNamespace

import numpy as np
import pytest

from moe_edge.papers.moe_prism.studies import kept
from moe_edge.papers.moe_prism.studies.kept import Kept
from moe_edge.papers.moe_prism.studies.models import (
    CENTRAL,
    CG,
    KINDS,
    PAPERS,
    ModelSettings,
)
from moe_edge.papers.moe_prism.studies.quality import Point

TEXTS = [[1, 2, 3, 4], [5, 6]]
ENGINE = SimpleNamespace(config=None)


@pytest.fixture
def measured(monkeypatch) -> list:
    """What was measured and not read."""
    done = []

    def measure(engine, texts):
        done.append(texts)
        return Point(7.0, [np.arange(3.0), np.full(5, len(done) / 3)])

    monkeypatch.setattr(kept.quality, "measure", measure)
    monkeypatch.setattr(kept.quality, "active_neurons", lambda config: 7.0)
    return done


def test_a_point_is_measured_once(tmp_path, measured):
    first = Kept(tmp_path / "points", "abc", {"LG": "s"}).point("LG", 12, ENGINE, TEXTS)
    again = Kept(tmp_path / "points", "abc", {"LG": "s"}).point("LG", 12, ENGINE, TEXTS)
    assert len(measured) == 1 and again.neurons == 7.0
    assert again.interval(first) == (1.0, 1.0)
    assert [*map(len, again.nats)] == [3, 5]
    assert again.perplexity == first.perplexity


@pytest.mark.parametrize(
    "changed",
    [{"commit": "abd"}, {"sha": "t"}, {"k": 13}, {"texts": [TEXTS[0], [5, 7]]}],
)
def test_what_it_depends_on_measures_again(tmp_path, measured, changed):
    for given in ({}, changed):
        what = {"commit": "abc", "sha": "s", "k": 12, "texts": TEXTS} | given
        of = Kept(tmp_path / "points", what["commit"], {"LG": what["sha"]})
        of.point("LG", what["k"], ENGINE, what["texts"])
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("git", "is_kept"),
    [
        ({"commit": "abc", "dirty": False}, True),
        ({"commit": "abc", "dirty": True}, False),
        ({"commit": None, "dirty": None}, False),
    ],
)
def test_sources_that_no_commit_holds_keep_nothing(
    tmp_path, measured, monkeypatch, git, is_kept
):
    monkeypatch.setattr(kept, "git_state", lambda: git)
    reader = SimpleNamespace(content_sha256=lambda: "s")
    monkeypatch.setattr(kept, "open_checkpoint", lambda path: reader)
    settings = ModelSettings(lg="folder", work_dir=str(tmp_path / "work"))
    of = Kept.of(settings)
    for _ in range(2):
        of.point("LG", 12, ENGINE, TEXTS)
    assert len(measured) == (1 if is_kept else 2)
    assert (tmp_path / "work" / "points").exists() == is_kept


def test_the_papers_gate_is_all_of_the_papers():
    """Its annealing of plain norms, its four neurons, its list of counts."""
    assert KINDS[PAPERS].options == {
        **{"solver": "anneal", "weigh_neurons": False},
        **{"gate_choice": "central", "gate_neurons": 4, "proxy_rule": "pattern"},
    }
    assert KINDS[CENTRAL].options == {"gate_choice": "central", "gate_neurons": 4}
    assert KINDS[CG].options == {}
