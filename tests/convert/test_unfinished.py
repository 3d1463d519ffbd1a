"""Conversions that are interrupted go on with what they have done."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from moe_edge.checkpoint.experts_file import write_arrays
from moe_edge.convert import sinks, stream, unfinished
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, OutputError
from tests.support.conversion import assert_same_tensors, convert
from tests.support.tiny_checkpoints import hf_folder, raw_config, write_folder

LAYERS = 4


def source_folder(folder):
    return write_folder(folder, raw_config("olmoe", num_hidden_layers=LAYERS))


def assert_same_checkpoint(got, expected):
    """Files are equal but Orbax's, which have times and names drawn by chance."""
    files = [
        sorted(
            path.relative_to(folder)
            for path in folder.rglob("*")
            if path.is_file() and "dense" not in path.parts
        )
        for folder in (got, expected)
    ]
    assert files[0] == files[1] != []
    for name in files[0]:
        assert (got / name).read_bytes() == (expected / name).read_bytes(), name
    readers = open_checkpoint(got), open_checkpoint(expected)
    tops = [reader.top() for reader in readers]
    assert_same_tensors(*tops)
    for layer in range(LAYERS):
        assert_same_tensors(*(reader.dense_layer(layer) for reader in readers))
        for reader in readers:
            reader.experts(layer)  # checks the CRCs of the manifest


def fails_at(layer, error):
    """A sink's `write_arrays`: half of the records of a layer, then an error."""
    name = f"layer_{layer:03d}.bin"

    def write(file, offset, arrays):
        if not str(file.name).endswith(name):
            return write_arrays(file, offset, arrays)
        write_arrays(file, offset, [arrays[0][: len(arrays[0]) // 2]])
        raise error

    return write


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("stop"), OSError(errno.ENOSPC, "No space left: stop")]
)
def test_interrupted_conversion_goes_on_where_it_stopped(tmp_path, monkeypatch, error):
    hf = source_folder(tmp_path / "hf")
    convert(hf, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(sinks, "write_arrays", fails_at(2, error))
        kind = OutputError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(kind, match="stop"):
            convert(hf, tmp_path / "out")
    work = tmp_path / ".out.converting"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        work.name,
        "hf",
        "whole",
    ]
    assert not (work / "made" / "manifest.json").exists()
    with pytest.raises(CheckpointError, match="neither manifest.json"):
        open_checkpoint(work / "made")
    read = []
    monkeypatch.setattr(
        stream._Mover,
        "_move",
        lambda self, layer, *task, of=stream._Mover._move: (
            read.append(layer),
            of(self, layer, *task),
        ),
    )
    convert(hf, tmp_path / "out")
    assert set(read) == {2, 3}
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")
    assert not work.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, to",
    [(signal.SIGKILL, "ours"), (signal.SIGKILL, "hf"), (signal.SIGINT, "ours")],
)
def test_killed_process_goes_on_where_it_stopped(tmp_path, number, to):
    """The real command; it gets the signal with half of a layer's records written."""
    hf = source_folder(tmp_path / "hf")
    command = ["--src", str(hf), "--dst", str(tmp_path / "out"), "--to", to]
    script = textwrap.dedent(f"""
        import os, sys, time
        from moe_edge.commands.scripts import convert
        from moe_edge.convert import sinks
        kind = sinks.OursSink if {to == "ours"} else sinks.HfSink
        of = kind.experts
        def experts(self, layer, first, records):
            of(self, layer, first, records[: len(records) // 2])
            if layer == 2:
                os.kill(os.getpid(), {int(number)})
                time.sleep(1)
            of(self, layer, first, records)
        kind.experts = experts
        sys.argv = ["convert", *{command!r}]
        convert.main()
    """)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", script]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True)
    expected = 130 if number == signal.SIGINT else -signal.SIGKILL
    assert ended.returncode == expected, ended.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.converting" / "done" / "0.json").exists()
    if number == signal.SIGINT:
        assert ".out.converting; the same command goes on there" in ended.stderr
    convert(hf, tmp_path / "out", to=to)
    convert(hf, tmp_path / "whole", to=to)
    if to == "ours":
        assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")
    for path in (tmp_path / "whole").glob("*.*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out", "whole"]


def test_other_source_or_settings_are_refused(tmp_path):
    hf = source_folder(tmp_path / "hf")
    first = convert(hf, tmp_path / "out", max_layers=2)
    assert first["finished"] is False and first["items_left"] == LAYERS
    assert first["work_dir"] == str(tmp_path / ".out.converting")
    with pytest.raises(OutputError, match=r'dtype null, now "float16": give that'):
        convert(hf, tmp_path / "out", dtype="float16")
    weights = next(hf.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    with pytest.raises(OutputError, match="out.converting .* with source "):
        convert(hf, tmp_path / "out")


@pytest.mark.parametrize("name", ["facts.json", "done/0.json"])
@pytest.mark.parametrize("text", ["", '{"a": ', "[]"])
def test_a_damaged_file_of_the_work_folder_is_refused_with_what_helps(
    tmp_path, name, text, capsys
):
    hf = source_folder(tmp_path / "hf")
    convert(hf, tmp_path / "out", max_layers=2)
    (tmp_path / ".out.converting" / name).write_text(text)
    capsys.readouterr()
    anew = r"converting, and the conversion begins anew"
    with pytest.raises(OutputError, match=f"{name} .*; remove .*{anew}"):
        convert(hf, tmp_path / "out")
    # The same command would not go on.
    assert "goes on there" not in capsys.readouterr().err


def test_layers_a_call_until_all_are_done(tmp_path):
    hf = source_folder(tmp_path / "hf")
    for left in (3, 0):
        found = convert(hf, tmp_path / "out", max_layers=3)
        assert found.get("items_left", 0) == left
    convert(hf, tmp_path / "whole", workers=1)
    assert found["content_sha256"] == open_checkpoint(hf).content_sha256()
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_workers_do_not_change_the_result(family, tmp_path, monkeypatch):
    """Also not of experts in one tensor a layer, whose bytes are hashed in order."""
    hf = hf_folder(tmp_path / "hf", family)
    found = {}
    monkeypatch.setattr("moe_edge.convert.content_hash.CHUNK_BYTES", 1)
    for workers in (1, 7):
        out = tmp_path / f"by_{workers}"
        found[workers] = convert(hf, out, workers=workers)["content_sha256"]
    assert len(set(found.values())) == 1
    one, many = (tmp_path / f"by_{workers}" for workers in (1, 7))
    for path in (*(one / "experts").iterdir(), one / "manifest.json"):
        assert (many / path.relative_to(one)).read_bytes() == path.read_bytes()


def test_refused_weights_leave_nothing(tmp_path):
    raw = raw_config("olmoe", num_hidden_layers=LAYERS)
    hf = write_folder(tmp_path / "hf", raw)
    convert(hf, tmp_path / "out", max_layers=1)
    facts = tmp_path / ".out.converting" / "facts.json"
    assert json.loads(facts.read_text())["to"] == "ours"
    path = next(hf.glob("*.safetensors"))
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-4 * 1024 * 4 : -4] = b"\xff" * (4 * 1024 * 4 - 4)  # NaN, behind layer 0
    path.write_bytes(bytes(data))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    stored = json.loads(facts.read_text())
    with pytest.raises(OutputError, match="with source"):  # its ends have changed
        convert(hf, tmp_path / "out")
    from moe_edge.convert.digest import source_facts

    facts.write_text(json.dumps(stored | {"source": source_facts(open_checkpoint(hf))}))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        convert(hf, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_what_was_moved_away_is_not_gone_on_with(tmp_path):
    """A process that was killed behind the last step leaves notes without files."""
    hf = source_folder(tmp_path / "hf")
    convert(hf, tmp_path / "out", max_layers=2)
    (tmp_path / ".out.converting" / "made").rename(tmp_path / "moved")
    convert(hf, tmp_path / "out")
    convert(hf, tmp_path / "whole")
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")


def test_removal_that_is_cut_off_leaves_nothing_to_go_on_with(tmp_path, monkeypatch):
    hf = source_folder(tmp_path / "hf")
    convert(hf, tmp_path / "out", max_layers=2)
    work = unfinished.Unfinished(tmp_path / ".out.converting")
    assert work.has_items
    removed, remove = [], unfinished.shutil.rmtree

    def cut_off(path, **options):
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(unfinished.shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            work.remove()
    assert work.made.is_dir() and not work.has_items
    convert(hf, tmp_path / "out")
    assert not work.path.exists()
