"""The kernels compiled for another processor, and what they compute there.

NEON by a cross compiler and an emulator (Debian: g++-aarch64-linux-gnu, qemu-user):
values alone, which says nothing of speed.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import moe_edge.kernels

NATIVE = Path(moe_edge.kernels.__file__).parent / "native"
VALUES = Path(__file__).with_name("native_values.cc")
HERE = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
THERE, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
OPTIONS = ("-std=c++20", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
OPTIONS += ("-Wno-psabi", '-DMOE_EDGE_BUILD_ID="there"')

is_there = HERE and all(map(shutil.which, (THERE, EMULATOR)))


def build(compiler: str, folder: Path) -> str:
    """The program of `VALUES` with all kernels."""
    folder.mkdir()
    options = [*OPTIONS, f"-I{NATIVE}", f"-isystem{jax.ffi.include_dir()}"]

    def compile_one(source: Path) -> str:
        to = str(folder / f"{source.name}.o")
        run([compiler, *options, "-c", str(source), "-o", to])
        return to

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sorted(NATIVE.glob("*.cc")), VALUES]))
    program = str(folder / "values")
    run([compiler, "-static", "-pthread", *objects, "-o", program])
    return program


def run(command: list[str], **options) -> bytes:
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not is_there, reason=f"no {THERE} or no {EMULATOR}")
def test_neon_computes_what_the_portable_kernels_do_here(tmp_path):
    here = np.frombuffer(run([build(HERE, tmp_path / "here")]), np.float32)
    there = build(THERE, tmp_path / "there")
    for threads in ("1", "2"):
        environment = {**os.environ, "MOE_EDGE_THREADS": threads}
        found = run([EMULATOR, there], env=environment)
        values = np.frombuffer(found, np.float32)
        assert len(values) == len(here) > 5000 and np.isfinite(here).all()
        assert here.std() > 0.1
        np.testing.assert_allclose(values, here, rtol=2e-5, atol=2e-5)
