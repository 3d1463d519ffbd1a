"""Objects of host kernels that builds share (MOE_EDGE_OBJECTS): never stale ones."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def clone(tmp_path):
    """What a build reads, with one small source and a header."""
    kernels = tmp_path / "clone" / "moe_edge" / "kernels"
    (kernels / "native").mkdir(parents=True)
    root = kernels.parents[1]
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    for folder in (root / "moe_edge", kernels):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "moe_edge/kernels/build_id.py", kernels)
    (kernels / "native" / "one.h").write_text("constexpr int kNumber = 1;\n")
    (kernels / "native" / "one.cc").write_text(
        '#include "one.h"\nint number() { return kNumber; }\n'
    )
    return root


def built(root, objects, *flags, made=None, **variables):
    """Builds into a folder of its own, or `made`."""
    made = (
        made or root / f"build{len([*root.glob('build*')])}{flags}{sorted(variables)}"
    )
    command = [sys.executable, "setup.py", "-q", "build_ext", *flags]
    command += ["--build-temp", str(made), "--build-lib", str(made)]
    environment = os.environ | {"MOE_EDGE_OBJECTS": str(objects)} | variables
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    return {path.name for path in objects.glob("*.o")}


def test_objects_are_shared_and_never_stale(clone, tmp_path):
    objects = tmp_path / "objects"
    first = built(clone, objects)
    assert len(first) == 1
    assert built(clone, objects) == first  # nothing changed
    seen = len(first)
    header = clone / "moe_edge/kernels/native/one.h"
    header.write_text("constexpr int kNumber = 2;\n")
    for flags, variables in (
        ((), {}),  # the header
        (("--define", "OTHER=1"), {}),
        (("--debug",), {}),
        ((), {"CFLAGS": "-O1"}),
        ((), {"CPATH": str(tmp_path)}),
    ):
        now = len(built(clone, objects, *flags, **variables))
        assert now == seen + 1, (flags, variables)
        seen = now


def test_two_builds_at_once_compile_once(clone, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(clone, other)
    objects = tmp_path / "objects"
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(lambda root: built(root, objects), (clone, other))]
    assert found[0] == found[1] and len(found[0]) == 1
    assert not [*objects.glob("*.partial")]


def test_objects_older_than_what_is_there_are_linked(clone, tmp_path):
    """Back to sources whose objects were shared before."""
    objects, made = tmp_path / "objects", tmp_path / "made"
    header = clone / "moe_edge/kernels/native/one.h"
    linked = []
    for number in (1, 2, 1):
        header.write_text(f"constexpr int kNumber = {number};\n")
        later = time.time() + len(linked) + 1  # than what was linked before
        os.utime(header, (later, later))
        built(clone, objects, made=made)
        (library,) = made.rglob("_native*")
        os.utime(library, (later, later))
        linked.append(library.read_bytes())
    assert linked[0] != linked[1] and linked[2] == linked[0]
