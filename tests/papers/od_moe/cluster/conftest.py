import json

import pytest

from tests.papers.od_moe.support.live_od_moe import LiveOdMoe
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = ["The river runs past", "How many sacks are there? There are 12", "A dog"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random Hugging Face checkpoint with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "prompt": p}) for i, p in enumerate(PROMPTS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def live(tiny, prompts, tmp_path):
    """Makes a run of all processes in this one: `live(shadow="nf4", ...)`."""
    return lambda **options: LiveOdMoe(tiny, prompts, tmp_path / "run", **options)
