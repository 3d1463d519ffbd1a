"""Windows of text for fine-tuning, and the growth of K."""

import numpy as np
import pytest

from moe_edge.core.checks import RequestError
from moe_edge.papers.moe_prism.refactor import texts
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from moe_edge.papers.moe_prism.refactor.texts import Windows, cut, read_windows
from tests.support.table_engine import LetterTokenizer
from tests.support.tiny_models import GQA


def test_cut_every_token_but_the_first_is_a_target_once():
    rows = cut(range(14), 4)
    assert rows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert cut(range(4), 4).shape == (0, 5)


def test_batch_epochs_are_permutations_and_depend_on_the_seed():
    rows_NS = np.arange(14).reshape(7, 2).astype(np.int32)
    windows = Windows(rows_NS, rows_NS, "")
    drawn = np.concatenate([windows.batch(n, 3, seed=1) for n in range(7)])
    for epoch in range(3):
        part = drawn[7 * epoch : 7 * epoch + 7]
        assert sorted(part[:, 0].tolist()) == rows_NS[:, 0].tolist()
    assert drawn[:7].tolist() != drawn[7:14].tolist()
    assert drawn[:3].tolist() != windows.batch(0, 3, seed=2).tolist()


def test_read_windows_holds_out_the_end(tmp_path, monkeypatch):
    tokenizer = LetterTokenizer()
    monkeypatch.setattr(texts, "load_tokenizer", lambda reader: tokenizer)
    settings = FineTuning(window=4, batch_tokens=4, held_out_rows=9)
    for name, text in (("a.txt", "abcdefghij" * 9), ("b.txt", "0123456789")):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    found = read_windows(None, paths, settings)
    assert found.train.shape == (23, 5)  # 95 of 100 tokens: five are held out
    assert found.held_out.tolist() == [tokenizer.encode("56789")]
    (tmp_path / "a.txt").write_text("abcdefghi")
    message = "a.txt has 9 tokens, expected more than two windows of 4"
    with pytest.raises(RequestError, match=message):
        read_windows(None, paths[:1], settings)


def test_stages_grow_linearly_over_the_steps():
    settings = FineTuning(
        tokens=8000, batch_tokens=1000, window=500, accumulate=1, k_stages=4
    )
    stages = FineTuning(k_start=3, k_end=12, k_stages=4).stages(GQA)
    assert stages == [3, 6, 9, 12]
    assert FineTuning().stages(GQA) == [1, 2, 3]  # a quarter of top_k to top_k
    ks = [settings.k_of(step, stages) for step in range(settings.steps)]
    assert ks == [3, 3, 6, 6, 9, 9, 12, 12]


def test_drawn_stages_are_each_trained_once_a_round_and_the_same_again():
    settings = FineTuning(
        tokens=39, batch_tokens=1, window=1, accumulate=1, k_order="drawn"
    )
    ks = [settings.k_of(step, [3, 6, 9]) for step in range(39)]
    rounds = [tuple(ks[at : at + 3]) for at in range(0, 39, 3)]
    assert {*map(frozenset, rounds)} == {frozenset((3, 6, 9))}
    assert len(set(rounds)) > 2
    assert ks == [settings.k_of(step, [3, 6, 9]) for step in range(39)]


@pytest.mark.parametrize("steps", range(1, 9))
def test_every_stage_has_a_step_and_the_last_trains_k_end(steps):
    settings = FineTuning(
        tokens=steps, batch_tokens=1, window=1, accumulate=1, k_start=3, k_end=12
    )
    stages = settings.stages(GQA)
    ks = [settings.k_of(step, stages) for step in range(settings.steps)]
    assert (settings.steps, sorted(set(ks)), ks[-1]) == (steps, stages, 12)
    assert steps == 1 or ks[0] == 3


def test_rate_falls_to_zero_over_the_decay():
    settings = FineTuning(
        tokens=10, batch_tokens=1, window=1, accumulate=1, learning_rate=1.0, decay=0.4
    )
    rates = [round(float(settings.rate(step)), 3) for step in range(10)]
    assert rates == [1.0] * 7 + [0.75, 0.5, 0.25]
