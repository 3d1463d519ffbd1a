"""The folder of compiled programs that tests keep between runs."""

import os

from tests.support.compile_cache import UNUSED_S, cache_folder, prune

NOW_S = 2e9


def write(path, size, used_s):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used_s, used_s))
    return path


def test_cache_folder_is_under_the_users_cache_and_names_jax(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    assert folder.is_dir() and folder.parent == tmp_path / "moe_edge-tests"
    assert folder.name.startswith("jax-") and folder == cache_folder()


def test_prune_deletes_the_longest_unused_until_half_is_left(tmp_path):
    here = tmp_path / "here"
    names = [f"one_thread/{i}" if i % 2 else f"{i}" for i in range(10)]
    files = [write(here / f"{n}-cache", 10, NOW_S + i) for i, n in enumerate(names)]
    prune(here, now_s=NOW_S, max_bytes=100)
    assert all(path.exists() for path in files)
    prune(here, now_s=NOW_S, max_bytes=99)
    assert [path.exists() for path in files] == [False] * 6 + [True] * 4


def test_prune_forgets_another_jax_after_a_month(tmp_path):
    here = write(tmp_path / "here" / "a-cache", 10, 0)
    old = write(tmp_path / "other" / "a-cache", 10, NOW_S - UNUSED_S - 1)
    recent = write(tmp_path / "other" / "b-cache", 10, NOW_S - 1)
    prune(here.parent, now_s=NOW_S)
    assert here.exists() and recent.exists() and not old.exists()
