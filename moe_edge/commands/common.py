"""What all commands share: common flags, exit codes, JSON last.

A command calls `run(ROOT, __doc__)`, which derives its flags from the root's signature
and docstring (`root_flags.py`), or adds flags named like parameters of the root. A
value comes from, in rising order: the function's default, a gin file,
`--gin_param`, a flag that was given. gin files may use the macros `OUT_DIR` and `SEED`.
"""

import inspect
import json
import logging as python_logging
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import gin
from absl import app, flags, logging

from moe_edge.commands import gin_files, out_dir, root_flags, signals
from moe_edge.commands.errors import (
    BAD_INPUT,
    USER_ERRORS,
    gin_errors,
    one_line,
    report,
)
from moe_edge.commands.gin_data import Names, check_settings
from moe_edge.core import processes
from moe_edge.core.checks import ConfigError, MoeEdgeError
from moe_edge.core.progress import counter

GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "gin file, or the name of one of ours such as smoe; repeatable"
)
GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param", [], "gin binding such as 'quickstart.max_new_tokens = 8'; repeatable"
)
OUT_DIR = flags.DEFINE_string(
    "out_dir",
    None,
    "folder of the results; default results/local/<experiment>/<date>_<device>_<git7>",
)
OVERWRITE = flags.DEFINE_bool("overwrite", None, "replace a non-empty --out_dir")
DRY_RUN = flags.DEFINE_bool("dry_run", None, "check flags, gin and paths, then stop")
SEED = flags.DEFINE_integer(
    "seed",
    None,
    "seed of everything random in the run",
    lower_bound=0,
    upper_bound=2**31 - 1,
)

INTERRUPTED, CLOSED_PIPE, TERMINATED = 130, 141, 143  # 128 + the signal, as shells say


def define_data_dir() -> flags.FlagHolder:
    """The `--data_dir` flag of scripts that read data."""
    return flags.DEFINE_string(
        "data_dir", None, "folder in which relative data paths are looked up too"
    )


def run(
    root: str | Callable[[], str],
    document: str = "",
    script_flags: Sequence[flags.FlagHolder] | None = None,
    out_parameter: str = "out_dir",
) -> None:
    """Parses flags and gin, calls the root, prints its summary; never returns.

    Args:
      root: name of the root function in gin, or what gives it once flags are known.
      document: the command's docstring, which `--help` shows.
      script_flags: the command's own flags, named like parameters of the root; None:
        one for every parameter that a flag can set.
      out_parameter: the root's parameter that --out_dir sets; there is a default
        folder only if that is `out_dir`.
    """
    if script_flags is None:
        from moe_edge.configurables import get_root

        function = get_root(root)
        script_flags = root_flags.define(function, set(flags.FLAGS))

    def main(argv: Sequence[str]) -> int:
        if not flags.FLAGS["verbosity"].present:  # JAX's, gin's and asyncio's chatter
            logging.set_verbosity(logging.FATAL)
            python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}; flags start with --")
        files = flags.FLAGS["gin_file"]
        files.value = [gin_files.find(file) for file in files.value]
        name = root if isinstance(root, str) else root()
        try:
            say_summary(call_root(name, script_flags, out_parameter))
        except MoeEdgeError as error:
            # gin's wrapper hands on attributes of the instance alone.
            if (summary := getattr(error, "summary", None)) is not None:
                say_summary(summary)
            raise
        return 0

    def parse(argv: Sequence[str]) -> list[str]:
        return parse_flags(argv, document)

    app.run(lambda argv: leave(guarded(main, argv)), flags_parser=parse)


def say_summary(summary: dict) -> None:
    """Prints the JSON line that is the last one on stdout."""
    sys.stdout.flush()
    print(json.dumps(plain(summary)), flush=True)


def leave(code: int) -> int:
    """Ends the process. After a signal Python's own shutdown is left out: XLA's threads
    may still compute and would crash in it. All folders have been tidied up by now.
    SIGTERM is ignored once `run_until_signal` has received it. So is it when one of
    several processes fails: JAX would wait for the others."""
    told = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    failed = code and processes.count() > 1
    if told or failed or code in (INTERRUPTED, TERMINATED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def guarded(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `main`; errors of the user are one line on stderr."""
    signals.install()
    if hasattr(sys.stdout, "reconfigure"):  # files hold what a terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        return main(argv)
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except USER_ERRORS as error:
        return report(error)
    except Exception:
        if processes.count() == 1:
            raise
        traceback.print_exc()  # and `leave`, without JAX's shutdown
        return 1
    except signals.Terminated:
        print("terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        signals.end()


def parse_flags(argv: Sequence[str], document: str) -> list[str]:
    """absl's parsing, with an error in one line; `--help` lists all our flags."""
    asked = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if {"-h", "--help", "-help"} & set(asked):
        if argv[0].endswith(".py"):  # as it was started
            document = re.sub(r"moe-edge (\w+)", r"python launch/\1.py", document)
        text = root_flags.help_text(document)
        sys.exit(guarded(lambda _: print(text, flush=True) or 0, argv))
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        told = root_flags.in_words(one_line(error))
        print(f"error: {told} (--help lists the flags)", file=sys.stderr)
        sys.exit(BAD_INPUT)


def call_root(
    root: str, script_flags: Sequence[flags.FlagHolder], out_parameter: str
) -> dict:
    """Binds gin files, parameters and flags, then calls the root function."""
    check_data_dir()
    made = None
    with gin_errors():
        from moe_edge.configurables import OPTIONS, SHARED, get_root, others, read_by

        gin.clear_config()
        function = get_root(root)
        skipped = others(root)
        macros = ("OUT_DIR", "SEED") if SEED.present else ("OUT_DIR",)
        names = Names(read_by(root), skipped, OPTIONS, get_root, macros)
        check_settings(GIN_FILE.value, GIN_PARAM.value, names)
        gin.parse_config_files_and_bindings(
            GIN_FILE.value,
            GIN_PARAM.value,
            finalize_config=False,
            skip_unknown=skipped,
        )
        known = inspect.signature(function).parameters
        if OUT_DIR.present and out_parameter not in known:
            raise ConfigError(f"--out_dir means nothing to {root}")
        for flag in (OVERWRITE, SEED, *script_flags):
            if flag.present and flag.value is not None:
                if flag.name not in known:
                    reads = ", which reads no data" if flag.name == "data_dir" else ""
                    raise ConfigError(
                        f"--{flag.name} means nothing to {root}{reads}; leave it out"
                    )
                gin.bind_parameter(f"{root}.{flag.name}", flag.value)
        if SEED.present:
            gin.parse_config(f"SEED = {SEED.value}")
        if out_parameter in known:
            made = choose_out_dir(root, script_flags, out_parameter)
        if DRY_RUN.value and "dry_run" in known:
            gin.bind_parameter(f"{root}.dry_run", True)
        for option in OPTIONS.keys() & known:
            hand_over(root, option, get_root(option))
        for option, roots in SHARED.items():
            if root in roots:
                share(root, option, get_root(option))
        gin.finalize()
    if DRY_RUN.value and "dry_run" not in known:
        return {"dry_run": True}
    arguments = {}
    if "config_text" in known:
        arguments["config_text"] = gin.operative_config_str
    with out_dir.removed_if_empty(made), counter(purpose(function, root)):
        return function(**arguments)


def purpose(function: Callable, root: str) -> str:
    """What a progress line calls the whole run: the first sentence of its docstring."""
    first = (inspect.getdoc(function) or root).partition("\n")[0]
    return re.split(r"[.:;](?: |$)", first.replace("`", ""))[0]


def hand_over(root: str, option: str, kind: Callable) -> None:
    """Binds `root.option = @option()` where a parameter `option.*` is bound.

    So policy files need not name the roots that take them. A recorded config of a run
    without the option binds None, which a policy file given after it replaces.
    """
    name = f"{root}.{option}"
    if out_dir.bound(name) and gin.query_parameter(name) is not None:
        return
    if any(
        out_dir.bound(f"{option}.{name}") for name in inspect.signature(kind).parameters
    ):
        gin.parse_config(f"{root}.{option} = @{option}()")


def share(root: str, option: str, kind: Callable) -> None:
    """Binds `root.x` where `option.x` is bound and nothing nearer says what it is."""
    for name in inspect.signature(kind).parameters:
        if not out_dir.bound(f"{root}.{name}"):
            for value in out_dir.bound(f"{option}.{name}"):
                gin.bind_parameter(f"{root}.{name}", value)


def check_data_dir() -> None:
    """Refuses a --data_dir that was given and does not exist."""
    flag = flags.FLAGS["data_dir"] if "data_dir" in flags.FLAGS else None
    if flag is not None and flag.value is not None and not Path(flag.value).is_dir():
        raise ConfigError(f"--data_dir {flag.value} is not a folder; check the path")


def choose_out_dir(
    root: str, script_flags: Sequence[flags.FlagHolder], parameter: str
) -> str | None:
    """Binds the folder that a run writes to; returns it if it was made for the run."""
    for flag in script_flags:
        if flag.name == parameter:
            out_dir.check_one_folder(OUT_DIR.value, parameter, flag.value)
    named = out_dir.bind_out_dir(root, parameter, OUT_DIR.value)
    if named is not None or parameter != "out_dir":
        return None
    make = not DRY_RUN.value
    default = out_dir.default_out_dir(experiment_name(root), make)
    out_dir.bind_out_dir(root, parameter, default)
    return default if make else None


def experiment_name(root: str) -> str:
    """The last gin file's name without its ending, or the root's name."""
    return Path(GIN_FILE.value[-1]).stem if GIN_FILE.value else root


def plain(value):
    """Python's own types for JSON; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # NumPy scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
