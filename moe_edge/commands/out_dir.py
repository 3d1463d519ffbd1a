"""Which folder a script writes to: its name, and that no two runs share one."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import gin

from moe_edge.core.checks import ConfigError, OutputError


def check_one_folder(out_dir: str | None, name: str, value: str | None) -> None:
    """Refuses --out_dir together with a flag of the same meaning and another value."""
    if None in (out_dir, value) or Path(out_dir).resolve() == Path(value).resolve():
        return
    raise ConfigError(
        f"--out_dir {out_dir} and --{name} {value} name two folders; give one"
    )


def bound(name: str) -> list:
    """The value that gin binds to a parameter, if there is one."""
    try:
        return [gin.query_parameter(name)]
    except ValueError:  # not bound
        return []


def bind_out_dir(root: str, parameter: str, flag: str | None) -> str | None:
    """Binds OUT_DIR and the root's parameter to the flag's value, else to gin's.

    Returns:
      The folder, or None if neither names one.
    """
    found = [flag, *bound(f"{root}.{parameter}"), *bound("OUT_DIR/macro.value")]
    # A reference to the macro, or gin.REQUIRED, is no string.
    out_dir = next((value for value in found if isinstance(value, str)), None)
    if out_dir is not None:
        gin.parse_config(f"OUT_DIR = {out_dir!r}")
        gin.bind_parameter(f"{root}.{parameter}", out_dir)
    return out_dir


def default_out_dir(experiment: str, make: bool) -> str:
    """A new folder under results/local/ of the working directory.

    Args:
      experiment: names the folder's parent.
      make: make it at once, so that of two runs that start in the same second the
        later gets a name with -2.
    """
    from moe_edge.metrics.machine import device_slug, git_state

    date = time.strftime("%Y-%m-%dT%H-%M-%S")
    commit = (git_state()["commit"] or "nogit")[:7]
    name = f"results/local/{experiment}/{date}_{device_slug()}_{commit}"
    for count in itertools.count(1):
        path = name if count == 1 else f"{name}-{count}"
        if os.path.exists(path):
            continue
        if make:
            try:
                os.makedirs(path)
            except FileExistsError:
                continue
            except OSError as error:
                raise OutputError(
                    f"results folder {path} cannot be made ({error.strerror}); name "
                    "one with --out_dir"
                ) from error
        return path


@contextlib.contextmanager
def removed_if_empty(out_dir: str | None) -> Iterator[None]:
    """Removes a folder that was made, and its parents, if it stays empty."""
    try:
        yield
    finally:
        if out_dir is not None:
            with contextlib.suppress(OSError):  # the run wrote there
                os.removedirs(out_dir)
