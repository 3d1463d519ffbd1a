"""The command line of pretraining; the run itself is tested in tests/training."""

import json
import os
import subprocess
import sys
from pathlib import Path

from moe_edge.core.files import locked_folder

ROOT = Path(__file__).parents[2]


def _pretrain(tmp_path, *flags):
    command = [sys.executable, str(ROOT / "launch/pretrain.py"), *flags]
    return subprocess.run(
        [*command, f"--out_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"},
        cwd=tmp_path,
    )


def test_pretrain_dry_run_prints_json_and_writes_nothing(tmp_path):
    done = _pretrain(tmp_path, "--dry_run", "--train_tokens=5000000")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["dry_run"]
    assert not (tmp_path / "run").exists()


def test_pretrain_rejects_decay_longer_than_run(tmp_path):
    done = _pretrain(tmp_path, "--train_tokens=1000", "--decay_tokens=2000")
    assert done.returncode != 0
    assert "decay_tokens 2000 exceeds train_tokens 1000" in done.stderr


def test_pretrain_is_refused_in_a_folder_that_a_run_is_writing(run_script, tmp_path):
    flags = ("--train_tokens=5000000", "--out_dir", tmp_path / "run")
    with locked_folder(tmp_path / "run", str(tmp_path / "run")):
        for more in ((), ("--dry_run",)):
            taken = f"another run (process {os.getpid()}) is writing {tmp_path}/run; "
            assert taken in run_script("pretrain", *flags, *more).error
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
