import json
import os
import subprocess
import sys

import numpy as np
import pytest

from moe_edge.commands import common, errors
from moe_edge.core.checks import ConfigError
from tests.launch.conftest import ROOT
from tests.support.live_run import WITH_INTERRUPTS
from tests.support.progress_lines import without_progress


def test_plain_gives_json_types():
    value = {"a": np.float32(0.5), "b": (np.int64(2), float("inf")), "c": [None, "x"]}
    assert common.plain(value) == {"a": 0.5, "b": [2, None], "c": [None, "x"]}


def test_one_line_drops_gins_appendix_and_line_breaks():
    error = ConfigError("bad\n value\n  In call to configurable 'x' (<function x>)")
    assert errors.one_line(error) == "bad value"
    assert errors.one_line(KeyError()) == "KeyError"


def test_script_unknown_flag_is_one_line(run_script):
    error = run_script("generate", "--promt", "x").error
    assert "Unknown command line flag 'promt'" in error


def test_a_flag_of_the_release_before_says_what_to_do(run_script):
    error = run_script("cluster", "--transport", "jax").error
    assert "--transport is no flag any more: servers have one transport" in error


def test_script_loose_argument_is_one_line(run_script):
    assert "unexpected argument 'x'" in run_script("generate", "x").error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gin_param", "import os"], "--gin_param:1: import 'os' would run code"),
        (
            ["--gin_param", "generate.colour = 1"],
            "generate: 'colour'; known: activations, ",
        ),
        (["--gin_file", "none.gin"], "gin file none.gin cannot be read: No such file"),
        (
            ["--prompts", "none.jsonl"],
            "--prompts none.jsonl does not exist; check the path",
        ),
    ],
)
def test_script_bad_input_is_one_line(run_script, arguments, message):
    assert message in run_script("generate", *arguments).error


def test_script_debug_shows_the_traceback(run_script):
    done = run_script("generate", "--debug")
    assert done.code == 2
    assert "Traceback" in done.stderr and "got neither" in done.stderr


def test_script_value_of_flag_wins_over_gin(run_script, tiny, tmp_path):
    (tmp_path / "run.gin").write_text(
        "OUT_DIR = 'from_gin'\ngenerate.out_dir = %OUT_DIR\n"
        "generate.prompt = ['from gin']\ngenerate.seed = 1\n"
    )
    common_flags = ["--gin_file", "run.gin", "--checkpoint", tiny, "--dry_run"]
    assert run_script("generate", *common_flags).summary["out_dir"] == "from_gin"
    summary = run_script(
        "generate", *common_flags, "--out_dir", "o", "--prompt=a", "--prompt=b"
    ).summary
    assert (summary["out_dir"], summary["prompts"]) == ("o", 2)
    assert not (tmp_path / "o").exists()


def test_script_default_out_dir_is_named_after_the_gin_file(run_script, tiny, tmp_path):
    (tmp_path / "mine.gin").write_text("generate.prompt = ['a']\n")
    done = run_script(
        "generate", "--gin_file", "mine.gin", "--checkpoint", tiny, "--dry_run"
    )
    assert done.summary["out_dir"].startswith("results/local/mine/")


TWICE = """
import os
import gin
from moe_edge.commands import common, out_dir as naming
from moe_edge.core.out_folder import atomic_folder

naming.time.strftime = lambda form: "now"

@gin.register
def twice(*, out_dir: str, fail: bool = False) -> dict:
    if fail:
        raise common.ConfigError("no")
    before = os.path.isdir(out_dir)
    with atomic_folder(out_dir) as folder:
        (folder / "x").write_text("")
    return {"out_dir": out_dir, "reserved": before}

common.run("twice")
"""


def test_script_default_out_dirs_of_one_second_differ(tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)

    def run(*flags):
        return subprocess.run(
            [sys.executable, "twice.py", *flags],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    assert run("--gin_param=twice.fail = True").returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["twice.py"]
    first, second = (json.loads(run().stdout) for _ in range(2))
    assert second["out_dir"] == first["out_dir"] + "-2"
    assert first["reserved"] and second["reserved"]


KILLED = """
import os, signal, sys
import gin
from moe_edge.commands import common
from moe_edge.core.out_folder import atomic_folder

@gin.register
def killed(*, out_dir: str) -> dict:
    with atomic_folder(out_dir):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

common.run("killed")
"""


# Python drops what is raised in such a callback; JAX has one.
KILLED_IN_CALLBACK = KILLED.replace(
    "        os.kill(os.getpid(), signal.SIGTERM)\n",
    "        import gc\n"
    "        gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGTERM))\n"
    "        gc.collect()\n"
    "        gc.callbacks.clear()\n",
)


# The first signal that comes back is not heard, as just before a wait in the system.
UNHEARD = KILLED_IN_CALLBACK.replace(
    "        signal.pause()\n",
    "        import time\n"
    "        handler = signal.signal(signal.SIGALRM, lambda *_: None)\n"
    "        time.sleep(0.1)\n"
    "        signal.signal(signal.SIGALRM, handler)\n"
    "        signal.pause()\n",
)


# A signal while a module is loaded, which would lose the exception; JAX crashes by it.
KILLED_IN_IMPORT = KILLED.replace(
    "        os.kill(os.getpid(), signal.SIGTERM)\n", "        import slow\n"
)
SLOW_IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
except BaseException:
    pass
"""


@pytest.mark.parametrize(
    "name, code, word", [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "interrupted")]
)
@pytest.mark.parametrize(
    "script", [KILLED, KILLED_IN_CALLBACK, UNHEARD, KILLED_IN_IMPORT]
)
def test_script_ended_by_a_signal_leaves_nothing(tmp_path, script, name, code, word):
    check_killed(tmp_path, ["killed.py"], script, name, code, word)


@pytest.mark.parametrize("script", [KILLED, KILLED_IN_IMPORT])
def test_script_that_is_imported_ends_by_a_signal(tmp_path, script):
    start = ["-c", "import killed"]
    check_killed(tmp_path, start, script, "SIGINT", 130, "interrupted")


def check_killed(tmp_path, start, script, name, code, word) -> None:
    """A script that is started so ends by a signal, and leaves nothing."""
    (tmp_path / "killed.py").write_text(script.replace("SIGTERM", name))
    (tmp_path / "slow.py").write_text(SLOW_IMPORT.replace("SIGTERM", name))
    done = subprocess.run(
        [*WITH_INTERRUPTS, *start, "--out_dir=out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = without_progress(done.stderr).strip()
    assert (done.returncode, said) == (code, word)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.py", "slow.py"]


ENDING = """
import atexit, time
import gin
from moe_edge.commands import common

atexit.register(time.sleep, 0.1)

@gin.register
def ending() -> dict:
    import slow
    return {}

common.run("ending")
"""


def test_script_that_ends_before_a_signal_comes_back_ends_well(tmp_path):
    (tmp_path / "ending.py").write_text(ENDING)
    signal = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "slow.py").write_text(signal)
    done = subprocess.run(
        [sys.executable, "ending.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{}\n", "")


AS_SCRIPT = [str(ROOT / "launch" / "generate.py")]
AS_COMMAND = ["-c", "from moe_edge.commands.main import main; main()", "generate"]


@pytest.mark.parametrize("command", [AS_SCRIPT, AS_COMMAND])
def test_script_interrupted_while_it_imports_ends_in_one_line(tmp_path, command):
    (tmp_path / "gin.py").write_text(  # one of the packages that it imports
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n"
    )
    done = subprocess.run(
        [*WITH_INTERRUPTS, *command],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_data_dir_that_is_missing_is_refused(run_script):
    done = run_script("evaluate", "--text=x", "--data_dir=nowhere", "--dry_run")
    assert done.error == "error: --data_dir nowhere is not a folder; check the path"


def test_seed_out_of_range_is_refused(run_script):
    done = run_script("generate", "--prompt=x", "--seed=99999999999999999999")
    assert "seed" in done.error and "99999999999999999999" in done.error


GIN_FILE = """
import nowhere.at.all
generate.prompt = ['a']
"""


def test_gin_import_is_refused_also_in_an_included_file(run_script, tmp_path):
    (tmp_path / "code.gin").write_text(GIN_FILE)
    (tmp_path / "run.gin").write_text("include 'code.gin'\n")
    for file in ("code.gin", "run.gin"):
        done = run_script("generate", "--gin_file", file, "--dry_run")
        assert done.error.startswith(
            "error: code.gin:2: import 'nowhere.at.all' would run code"
        )


def test_gin_file_that_is_missing_below_a_folder_is_named(run_script, tmp_path):
    # gin takes the folder for a Python package.
    (tmp_path / "configs").mkdir()
    (tmp_path / "run.gin").write_text("include 'configs/none.gin'\n")
    for file in ("configs/none.gin", "run.gin"):
        done = run_script("generate", "--gin_file", file, "--dry_run")
        assert done.error == (
            "error: gin file configs/none.gin cannot be read: No such file or "
            "directory; check the path"
        )


def test_gin_file_that_includes_itself_is_refused(run_script, tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("include 'a.gin'\n")
    done = run_script("generate", "--gin_file", "a.gin", "--dry_run")
    assert "gin file a.gin includes itself" in done.error


@pytest.mark.parametrize(
    "script, binding, expected",
    [
        ("generate", "generate.checkpoint = 3", "a text"),
        ("generate", "generate.temperature = 'a'", "a number"),
        ("generate", "generate.offload = 3", "OffloadOptions or None"),
        ("generate", "generate.device_memory = 25", "a text or None"),
        ("generate", "generate.prompt = 'one'", "a list (a text each)"),
        ("generate", "generate.batch_size = True", "a whole number"),
        ("generate", "offload.predictor_options = 3", "options {'name': value}"),
        ("generate", "offload.asynchronous = 'no'", "True or False"),
        ("simulate", "simulate.skew = 'a'", "a number"),
        ("simulate", "simulate.cluster_options = 5", "options {'name': value} or None"),
        ("convert", "convert_checkpoint.dtype = 16", "a text or None"),
        ("refactor", "refactor_model.gate = 1", "a text"),
        ("pretrain", "pretrain.learning_rate = 'fast'", "a number"),
    ],
)
def test_gin_value_of_another_type_is_refused(run_script, script, binding, expected):
    name, value = binding.split(" = ")
    flags = ["--gin_param", binding, "--dry_run"]
    if name.startswith("offload"):
        flags += ["--gin_param", "generate.offload = @offload()", "--prompt", "a"]
    done = run_script(script, *flags)
    assert done.error == f"error: {name} is {value}, expected {expected}"


@pytest.mark.parametrize(
    "binding", ["generate.batch_size = 2", "offload.slot_plan_options = {'slots': [2"]
)
def test_gin_number_beyond_64_bits_is_refused(run_script, binding):
    binding += "0" * 30 + ("]}" if "[" in binding else "")
    flags = ["--gin_param", binding, "--gin_param", "generate.offload = @offload()"]
    done = run_script("generate", *flags, "--prompt", "a", "--dry_run")
    assert "expected a whole number of at most 64 bits" in done.error


def test_help_lists_all_flags_and_exits_0(run_script):
    done = run_script("generate", "--help")
    assert (done.code, done.stderr) == (0, "")
    heads = [line.split()[0] for line in done.stdout.splitlines() if "  --" in line]
    wanted = {"--device_memory", "--k", "--out_dir", "--gin_file", "--[no]dry_run"}
    assert wanted | {"--seed", "--prompt"} <= set(heads)
    assert "  --data_dir " in run_script("evaluate", "--help").stdout
    assert max(map(len, done.stdout.splitlines())) < 100


PIPED = """
import gin
from moe_edge.commands import common

@gin.register
def piped(*, out_dir: str) -> dict:
    for number in range(100_000):
        print(number)
    return {}

common.run("piped")
"""


def test_script_whose_reader_goes_away_is_quiet(tmp_path):
    (tmp_path / "piped.py").write_text(PIPED)
    process = subprocess.Popen(
        [sys.executable, "piped.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    said = without_progress(process.stderr.read().decode())
    assert (process.wait(timeout=300), said) == (141, "")
    process.stderr.close()


def test_default_folder_that_cannot_be_made_names_the_flag(run_script, tmp_path):
    (tmp_path / "results").write_text("a file")
    done = run_script("replay", "--trace=t", "--slots_per_layer=2")
    assert done.error.startswith("error: results folder results/local/replay/")
    assert done.error.endswith("; name one with --out_dir")


def test_options_of_offload_are_not_ignored_where_nothing_names_them(run_script, tiny):
    common = ("--checkpoint", tiny, "--prompt", "a", "--dry_run", "--gin_param")
    done = run_script("generate", *common, "offload.eviction = 'bogus'")
    assert "eviction policy" in done.error and "'bogus'" in done.error
    done = run_script("generate", *common, "generate.offload = None")
    assert done.summary["dry_run"]
    both = "generate.offload = None", "--gin_param", "offload.eviction = 'bogus'"
    done = run_script("generate", *common, *both)  # a recorded config and a policy
    assert "eviction policy" in done.error and "'bogus'" in done.error


def test_keys_of_options_that_are_no_names_are_refused(run_script, tiny):
    done = run_script(
        *("generate", "--checkpoint", tiny, "--prompt", "a", "--dry_run"),
        *("--gin_param", "offload.eviction_options = {1: 2}"),
    )
    assert "offload.eviction_options is {1: 2}, expected options {" in done.error
