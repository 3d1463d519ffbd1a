"""A lossy offload is scored by decode steps; a lossless one as the resident model."""

import json
import shutil

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.run import run_evaluate
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared_programs")

LOSSY = OffloadOptions(
    device_memory="25%", route="drop", route_options={"threshold": 0.45}
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("run") / "tiny")


def evaluate(tmp_path, tiny, **given):
    out_dir = str(tmp_path / "o")
    given |= {"batch_size": 2, "overwrite": True}  # all modes: one shape of a step
    return run_evaluate(out_dir=out_dir, checkpoint=tiny, **given)


def test_text_perplexity_of_a_lossy_mode_is_its_own(tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    given = {"text": str(tmp_path / "t.txt"), "window": 32, "stride": 32}
    resident = evaluate(tmp_path, tiny, **given)
    lossy = evaluate(tmp_path, tiny, offload=LOSSY, **given)
    assert "lossless" not in resident
    assert lossy["lossless"] is False and 0 < lossy["hit_ratio"] < 1
    assert lossy["tokens"] == resident["tokens"]
    assert abs(lossy["perplexity"] / resident["perplexity"] - 1) > 1e-3
    stored = json.loads((tmp_path / "o" / "evaluation.json").read_text())
    assert stored["lossless"] is False


def test_no_end_token_is_put_behind_a_text(tiny, tmp_path):
    """A text's end is no end of what its author wrote: it is not scored."""
    (tmp_path / "t.txt").write_text(TEXT)
    ends = shutil.copytree(tiny, tmp_path / "ends")
    raw = json.loads((ends / "tokenizer.json").read_text())
    token = raw["added_tokens"][0]
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}]
        + [{"SpecialToken": {"id": token["content"], "type_id": 0}}],
        "pair": [],
        "special_tokens": {
            token["content"]: {
                "id": token["content"],
                "ids": [token["id"]],
                "tokens": [token["content"]],
            }
        },
    }
    (ends / "tokenizer.json").write_text(json.dumps(raw))
    encode = load_tokenizer(open_checkpoint(ends)).encode
    assert encode("a")[-1] == token["id"] != encode("a", end=False)[-1]
    given = {"text": str(tmp_path / "t.txt"), "window": 32, "stride": 32}
    plain, ended = (evaluate(tmp_path, path, **given) for path in (tiny, ends))
    assert ended["tokens"] == plain["tokens"]
    assert ended["perplexity"] == plain["perplexity"]


def test_choices_of_a_lossy_mode_are_scored_by_steps(tiny, tmp_path):
    row = {"id": "q", "prompt": "How many", "choices": ["12 sacks", "3 cats and 1 dog"]}
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row | {"answer_index": 0}))
    scores = []
    for offload in (None, LOSSY):
        summary = evaluate(tmp_path, tiny, mcq=str(path), offload=offload)
        assert summary["n"] == 1
        line = json.loads((tmp_path / "o" / "questions.jsonl").read_text())
        scores.append(np.asarray(line["nats_per_byte"]))
    assert np.abs(scores[0] - scores[1]).max() > 1e-4
    np.testing.assert_allclose(*scores, rtol=0.5)  # of the same tokens


def test_logits_of_a_lossy_mode_are_its_own(tiny, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(1, 25).reshape(2, 12))
    logits = []
    for name, offload in (("a", None), ("b", LOSSY)):
        path = str(tmp_path / f"{name}.npz")
        evaluate(
            tmp_path, tiny, tokens=str(tmp_path / "t.npy"), logits=path, offload=offload
        )
        with np.load(path) as file:
            logits.append(file["logits"])
    assert logits[0].shape == logits[1].shape == (2, 12, 320)
    # The first position is prefilled, which no route changes.
    np.testing.assert_allclose(logits[1][:, 0], logits[0][:, 0], atol=1e-4)
    assert np.abs(logits[1][:, 1:] - logits[0][:, 1:]).max() > 1e-2
