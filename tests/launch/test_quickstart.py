import pytest

from moe_edge.metrics.schema import validate_entry
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.slow
def test_quickstart_writes_an_entry(run_script, tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=640)
    flags = ["--checkpoint", tiny, "--characters", 150, "--max_new_tokens", 4]
    done = run_script("quickstart", *flags, "--out_dir", "q")
    summary = done.summary
    assert summary["tokens_per_s"] > 0 and summary["perplexity"] > 1
    result = validate_entry(tmp_path / "q")
    assert result["machine"]["backend"] == "cpu"
    assert set(result["workload"]) == {
        *("arithmetic", "words", "stories", "tables", "books", "code")
    }
    assert (tmp_path / "q" / "plot.png").stat().st_size > 5_000
    assert "right:" in done.stdout
    shown = "Results and pictures: q/README.md, q/plot.png, q/timeline.png"
    assert shown in done.stdout.splitlines()
