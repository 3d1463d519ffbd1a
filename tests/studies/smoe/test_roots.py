import pytest

from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.studies.smoe.roots import STUDIES, run_study


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": "fig0"}, ConfigError, "unknown study 'fig0'; known: replay_public"),
        ({"name": "replay_public_traces"}, ConfigError, "traces is empty"),
        ({"rounds": 0}, ConfigError, "rounds must be a positive whole number, got 0"),
        ({"checkpoint": "nowhere"}, CheckpointError, "nowhere"),
        ({"data_dir": "/", "sources": ("gone.txt",)}, FileNotFoundError, "gone.txt"),
    ],
)
def test_study_bad_input_is_refused(tmp_path, given, error, message):
    out_dir = tmp_path / "o"
    with pytest.raises(error, match=message):
        run_study(
            **{"name": "smoe_fig6", "out_dir": str(out_dir), "dry_run": True} | given
        )
    assert not out_dir.exists()


def test_study_full_folder_is_refused(tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    with pytest.raises(OutputError, match="--overwrite"):
        run_study(name="smoe_fig6", out_dir=str(tmp_path))


@pytest.mark.parametrize("name", [name for name in STUDIES if "traces" not in name])
def test_study_dry_run_writes_nothing(tmp_path, name):
    summary = run_study(name=name, out_dir=str(tmp_path / "o"), dry_run=True)
    assert summary == {"dry_run": True, "study": name, "out_dir": str(tmp_path / "o")}
    assert not (tmp_path / "o").exists()
