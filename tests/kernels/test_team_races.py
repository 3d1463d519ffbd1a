"""The team under the thread sanitizer: no race, and one that is put in is found."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import moe_edge.kernels

TEAM = Path(moe_edge.kernels.__file__).parent / "native" / "team.h"
STRESS = Path(__file__).with_name("team_stress.cc")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, team: str) -> list[str] | None:
    """The program that runs the stress on this team; None without the sanitizer."""
    folder.mkdir()
    (folder / "team.h").write_text(team)
    program = str(folder / "stress")
    options = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    built = subprocess.run(
        [COMPILER, *options, f"-I{folder}", STRESS, "-o", program],
        capture_output=True,
        text=True,
    )
    if "tsan" in built.stderr:
        return None
    assert built.returncode == 0, built.stderr
    return [program]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_ten_thousand_jobs_of_two_callers_have_no_race(tmp_path):
    team = TEAM.read_text()
    waits = "SpinUntil([&] { return done.load"
    assert team.count(waits) == 1
    # A phase that does not wait for the one before.
    broken = team.replace(waits, f"(void)({waits.removeprefix('SpinUntil(')}")
    programs = [build(tmp_path / n, text) for n, text in (("a", team), ("b", broken))]
    if None in programs:
        pytest.skip("the compiler has no thread sanitizer")
    good, bad = (
        subprocess.run(program, capture_output=True, text=True, timeout=300)
        for program in programs
    )
    if "FATAL: ThreadSanitizer" in good.stderr:
        pytest.skip("the thread sanitizer does not run on this system")
    assert (good.returncode, good.stderr) == (0, "")
    assert "data race" in bad.stderr
