"""Pausing, killing and taking up a fine-tuning run on a tiny checkpoint."""

import json

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.papers.moe_prism.refactor.finetune import train
from tests.papers.moe_prism.support.tiny_finetuning import finetune_tiny, write_source
from tests.support.tiny_checkpoint import TEXT

pytestmark = pytest.mark.slow  # whole runs: minutes of compilation


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


TAUGHT = {"teacher_kl": 1.0, "k_order": "drawn"}


@pytest.fixture(scope="module", params=[{}, TAUGHT], ids=["text", "taught"])
def whole(source, request):
    """A run in one go, with its result's folder and its settings."""
    out = source / "tuned"
    return finetune_tiny(source, out, **request.param), out, request.param


@pytest.fixture(autouse=True)
def saved_after_every_step(monkeypatch):
    monkeypatch.setattr(train, "CHECKPOINT_MINUTES", 0.0)


def test_resumed_equals_uninterrupted(source, whole, tmp_path):
    out, given = tmp_path / "resumed", whole[2]
    first = finetune_tiny(source, out, max_minutes=1e-9, **given)
    assert not first["finished"] and first["step"] == 0 and not out.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Clock, "left", property(_stops_after(4)))
        second = finetune_tiny(source, out, **given)
    assert not second["finished"] and second["step"] == 4
    third = finetune_tiny(source, out, **given)
    assert third["finished"] and third["held_out_before"] == first["held_out_before"]
    assert third["held_out_after"] == whole[0]["held_out_after"]
    for layer in range(2):
        got = open_checkpoint(out).dense(layer)["router.weight"]
        want = open_checkpoint(whole[1]).dense(layer)["router.weight"]
        np.testing.assert_array_equal(got, want)


def _stops_after(steps):
    asked = []

    def left(self):
        asked.append(1)
        return steps - len(asked) + 1

    return left


def test_other_settings_do_not_resume(source, tmp_path):
    out = tmp_path / "out"
    finetune_tiny(source, out, max_minutes=1e-9)
    message = r"learning_rate is 0.5, it was 0.03; .* remove \S+/out.training$"
    with pytest.raises(ConfigError, match=message):
        finetune_tiny(source, out, learning_rate=0.5)
    (source / "other.txt").write_text(TEXT * 13)
    with pytest.raises(ConfigError, match="text_sha256"):
        finetune_tiny(source, out, text="other.txt")


def test_records_after_a_kill_name_every_step_once(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    records = tmp_path / "out.training" / "metrics.jsonl"

    class Killed(BaseException):
        """Not an error that is handled: as a kill, it saves nothing more."""

    def append(path, record):
        append_record(path, record)
        if record["step"] == 4:
            raise Killed

    append_record = train.append_record
    with monkeypatch.context() as patch:
        patch.setattr(train, "append_record", append)
        with pytest.raises(Killed):  # nothing was saved
            patch.setattr(train, "CHECKPOINT_MINUTES", 60.0)
            finetune_tiny(source, out)
        assert _steps(records) == [1, 2, 3, 4]
        patch.setattr(train, "CHECKPOINT_MINUTES", 0.0)
        with pytest.raises(Killed):  # 3 steps were saved
            finetune_tiny(source, out)
        assert _steps(records) == [1, 2, 3, 4]
    monkeypatch.setattr(train.Clock, "left", property(_stops_after(2)))
    assert finetune_tiny(source, out)["step"] == 5
    assert _steps(records) == [1, 2, 3, 4, 5]


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_loss_that_is_not_finite_says_what_to_remove(source, tmp_path):
    message = r"the loss is nan at step \d; lower .* remove \S+/out.training$"
    with pytest.raises(ConfigError, match=message):
        finetune_tiny(source, tmp_path / "out", learning_rate=3e38)
