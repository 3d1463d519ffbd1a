"""The CUDA kernel for few rows with a thread for each lane, under the thread sanitizer.

The host kernels run a warp's lanes as loops. Here cuda_lanes.h runs, but for its one
load by a GPU's instructions: warps run at once, all lanes come to each shuffle, and the
bits are those of the loops.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from moe_edge.kernels import nvrtc
from tests.kernels.test_team_races import COMPILER

PROGRAM = Path(__file__).with_name("few_lanes.cc")
SOURCES = ("cuda_calls.h", "cuda_lanes.h", "cuda_shim.h", "few.cu", "prefetch.cu")


def build(folder: Path, name: str, old: str, new: str) -> Path | None:
    """The program, with one change to a source; None: there is no sanitizer."""
    folder.mkdir()
    for each in SOURCES:
        text = (nvrtc.SOURCES / each).read_text()
        if each == name:
            text, count = re.subn(old, lambda _: new, text, flags=re.S)
            assert count == 1
        if each == "cuda_lanes.h":
            load = "found = known ? *(const uint4*)at : uint4{0, 0, 0, 0};"
            text, count = re.subn(r"asm volatile\(.*?\);", load, text, flags=re.S)
            assert count == 1
        (folder / each).write_text(text)
    program = folder / "lanes"
    options = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-fno-strict-aliasing"]
    options += ["-fsanitize=thread", "-pthread", f"-I{folder}"]
    built = subprocess.run(
        [COMPILER, *options, PROGRAM, "-o", program, "-ldl"],
        capture_output=True,
        text=True,
    )
    if "tsan" in built.stderr:
        return None
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_warps_that_run_at_once_have_no_race_and_the_bits_of_loops(tmp_path):
    same = "few.cu", r"\Z", ""
    # Who takes what is there takes what arrives, too.
    races = "few.cu", r": host >= 0\)", ": false)"
    programs = [build(tmp_path / n, *each) for n, each in (("a", same), ("b", races))]
    if None in programs:
        pytest.skip("the compiler has no thread sanitizer")
    first_only = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    good, bad = (
        subprocess.run(
            program, capture_output=True, text=True, env=first_only, timeout=600
        )
        for program in programs
    )
    if "FATAL: ThreadSanitizer" in good.stderr:
        pytest.skip("the thread sanitizer does not run on this system")
    assert (good.returncode, good.stderr, good.stdout) == (0, "", "0 wrong\n")
    assert "data race" in bad.stderr
