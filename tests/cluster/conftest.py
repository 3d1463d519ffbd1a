import json

import pytest

from moe_edge.cluster import content
from tests.support.live_run import LiveRun
from tests.support.tiny_checkpoint import write_tiny_checkpoint

TEXTS = (
    "The river",
    "How many sacks are there? There are",
    "m",
    "The miller counts his sacks.",
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A folder of the tests' own for hashes of checkpoints."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv(content.CACHE, str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny checkpoint: two layers of eight experts."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A prompts file whose second and last requests come to server 0; of one shape."""
    path = tmp_path_factory.mktemp("cluster") / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(TEXTS)]
    rows[1]["server"] = rows[3]["server"] = 0
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def start(tmp_path):
    """Starts `launch/cluster.py` with flags; nothing of it outlives the test."""
    runs = []

    def start_one(*flags) -> LiveRun:
        runs.append(LiveRun(tmp_path, *flags))
        return runs[-1]

    yield start_one
    for run in runs:
        run.end()


@pytest.fixture
def secret(tmp_path):
    """A file with a secret."""
    path = tmp_path / "secret"
    path.write_text("a secret of the tests, long enough")
    path.chmod(0o600)
    return path
