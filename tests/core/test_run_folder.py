import inspect

import pytest

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.core.typed import checked


@root
def run_thing(run: RunFolder, *, trace: str, horizon: int = 1) -> dict:
    """Writes a thing."""
    if run.dry_run:
        return {"trace": trace}
    with run.writing() as folder:
        (folder / "thing.txt").write_text(f"{trace} {horizon}", encoding="utf-8")
    return {"horizon": horizon}


def test_root_writes_its_folder_with_the_config_and_names_it_last(tmp_path):
    out = tmp_path / "out"
    summary = run_thing(out_dir=out, trace="t", config_text=lambda: "x = 1\n")
    assert list(summary.items()) == [("horizon", 1), ("out_dir", str(out))]
    assert (out / "thing.txt").read_text("utf-8") == "t 1"
    assert (out / "config.gin").read_text("utf-8") == "x = 1\n"
    with pytest.raises(OutputError, match="not empty; add --overwrite"):
        run_thing(out_dir=out, trace="t")
    run_thing(out_dir=out, trace="u", overwrite=True)
    assert not (out / "config.gin").exists()


def test_root_dry_run_says_so_and_writes_nothing(tmp_path):
    out = str(tmp_path / "out")
    summary = run_thing(out_dir=out, trace="t", dry_run=True)
    assert summary == {"dry_run": True, "trace": "t", "out_dir": out}
    assert not (tmp_path / "out").exists()


def test_root_shows_the_parameters_of_its_folder_in_its_signature():
    parameters = inspect.signature(run_thing).parameters
    assert list(parameters) == [
        *("out_dir", "overwrite", "dry_run", "config_text"),
        *("trace", "horizon"),
    ]
    assert parameters["out_dir"].default is inspect.Parameter.empty
    assert parameters["overwrite"].default is False


def test_root_without_a_value_names_its_flags(tmp_path):
    with pytest.raises(ConfigError, match="no value for --out_dir, --trace: give it"):
        checked("thing", run_thing)()
    with pytest.raises(TypeError, match="lookahead"):
        run_thing(out_dir=tmp_path / "out", trace="t", lookahead=2)


def test_run_folder_apart_from_inputs(tmp_path):
    run = RunFolder(tmp_path / "out")
    run.check_apart(tmp_path / "in", None)
    with pytest.raises(OutputError, match="overlaps the source"):
        run.check_apart(tmp_path / "out" / "in")
