"""The bench of a study."""

import pytest

from moe_edge.bench import engines
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = [[1, 2, 3], [4, 5, 6]]


def not_here(*_):
    raise AssertionError("measured in this process")


@pytest.mark.slow
def test_layer_beside_inline_programs_is_timed_in_another_process(
    tmp_path, monkeypatch
):
    write_tiny_checkpoint(tmp_path / "tiny")
    with engines.Bench(tmp_path / "tiny", with_tokenizer=False) as bench:
        assert 0 < bench.layer_seconds(PROMPTS, 4) < 1
        monkeypatch.setattr(engines, "is_inline", lambda: True)
        monkeypatch.setattr(engines, "time_layer", not_here)
        assert 0 < bench.layer_seconds(PROMPTS, 4) < 1
