"""The folder of one run, and the functions behind scripts ("roots") that write one."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.core import folder_lock, processes
from moe_edge.core.checks import OutputError
from moe_edge.core.files import (
    check_apart,
    check_out_dir,
)
from moe_edge.core.out_folder import (
    atomic_folder,
    move_folder,
    taken_folder,
    write_folder,
)
from moe_edge.core.typed import bare

CONFIG_NAME = "config.gin"
Writer = Callable[[Path], None]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and how. Of several processes the first one alone does.

    Attributes:
      out_dir: the folder, complete or not there.
      overwrite: replace earlier results.
      dry_run: check what can be checked without weights, then stop.
      config_text: gives the settings to store as config.gin.
    """

    out_dir: str | Path
    overwrite: bool = False
    dry_run: bool = False
    config_text: Callable[[], str] = str

    def __post_init__(self):
        """Raises OutputError if the results cannot be written there."""
        if processes.writes():
            check_out_dir(self.out_dir, self.overwrite)
        if self.dry_run:
            folder_lock.check_free(self.path)

    @property
    def path(self) -> Path:
        """The folder, resolved."""
        return Path(self.out_dir).resolve()

    def check_apart(self, *inputs: str | Path | None) -> None:
        """Raises OutputError if the folder is, holds or lies in a folder that is read.

        Args:
          inputs: paths; None is skipped.
        """
        check_apart(self.out_dir, *(path for path in inputs if path is not None))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keeps other runs out of `path` until the end; nothing in a dry run.

        Raises:
          OutputError: a run that is alive has taken it.
        """
        if self.dry_run or not processes.writes():
            yield
            return
        with taken_folder(self.out_dir, self.overwrite):
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yields a temporary folder that, with config.gin, becomes `path` at the end.

        For what is written while it is made. On an exception it is removed, and `path`
        stays as it was.
        """
        with atomic_folder(self.out_dir, self.overwrite) as folder:
            yield folder
            self._write_config(folder)

    def write(
        self, save: Writer, files: Mapping[str | Path, Writer] | None = None
    ) -> None:
        """Writes results that are complete, and config.gin; see `write_folder`.

        Args:
          save: writes into a folder; it is called again with another one if it fails.
          files: more that the user asked for -> what writes each. Those that lie in the
            folder go with it; others are written even if the folder cannot be.
        Raises:
          OutputError: says of all that could not be written.
        """
        if not processes.writes():
            return
        inside, writes = {}, []
        for path, write in (files or {}).items():
            place = Path(path).parent.resolve() / Path(path).name
            if place.is_relative_to(self.path):
                inside[place.relative_to(self.path)] = write
            else:
                writes.append(functools.partial(write, place))

        def save_all(folder: Path) -> None:
            save(folder)
            for place, write in inside.items():
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                write(folder / place)
            self._write_config(folder)

        folder = functools.partial(write_folder, self.out_dir, save_all, self.overwrite)
        _call_all([folder, *writes])

    def move(self, made: Path) -> None:
        """Adds config.gin to a complete folder next to `path` and renames it to that.

        Raises:
          OSError, OutputError: it cannot be; `made` then still has everything.
        """
        self._write_config(made)
        move_folder(made, self.out_dir, self.overwrite)

    def _write_config(self, folder: Path) -> None:
        if text := self.config_text():  # none where no script called
            (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _call_all(writes: Sequence[Callable[[], None]]) -> None:
    """Calls each, also after others failed, and raises what failed as one error."""
    failed = []
    for write in writes:
        try:
            write()
        except (OSError, OutputError) as error:
            failed.append(error)
    if len(failed) > 1:
        raise OutputError("; ".join(map(str, failed))) from failed[0]
    if failed:
        raise failed[0]


def root(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Makes a root of `function(run: RunFolder, *, ...)`: what a script calls.

    A root takes keywords only: those of the function, and instead of `run` the
    attributes of `RunFolder`. Its summary is the function's with `out_dir` at the end
    (unless it says None: nothing was written) and, of a dry run, `dry_run` first.
    """

    @functools.wraps(function)
    def in_taken_folder(*, run: RunFolder, **given) -> dict[str, Any]:
        with run.taken():  # before anything is computed
            return function(run=run, **given)

    run_in = unpacked(run=RunFolder)(in_taken_folder)

    @functools.wraps(run_in)
    def call(**arguments) -> dict[str, Any]:
        summary = run_in(**arguments)
        first = {"dry_run": True} if arguments.get("dry_run") else {}
        out_dir = summary.get("out_dir", str(arguments["out_dir"]))
        return first | summary | {"out_dir": out_dir}

    call.__signature__ = inspect.signature(run_in)
    del call.__wrapped__  # gin would read the signature of that
    return call


def documented(text: str, *kinds: type) -> str:
    """A docstring, and below it those of dataclasses and their bases, for `--help`."""
    classes = dict.fromkeys(
        base
        for kind in kinds
        for base in kind.__mro__[-2::-1]
        if dataclasses.is_dataclass(base)
    )
    return "\n\n".join(filter(None, [text, *map(inspect.getdoc, classes)]))


class OneOf(NamedTuple):
    """Dataclasses whose fields callers may give, and what makes the one they mean."""

    classes: Collection[type]
    make: Callable[..., Any]


def unpacked(**kinds: type | OneOf) -> Callable[[Callable], Callable]:
    """Lets callers give the fields of dataclasses where a function takes objects.

    All arguments are keywords then.

    Args:
      kinds: parameter -> dataclass, or one of several. Callers, gin and flags see the
        fields in place of the parameter, with the text that `Attributes` say of them;
        options need no second list in a signature.
    """
    several = {
        name: kind if isinstance(kind, OneOf) else OneOf((kind,), kind)
        for name, kind in kinds.items()
    }
    fields = {
        name: {
            field: parameter.replace(annotation=bare(parameter.annotation))
            for each in reversed(tuple(kind.classes))
            for field, parameter in inspect.signature(each).parameters.items()
        }
        for name, kind in several.items()
    }

    def decorate(function: Callable) -> Callable:
        parameters = []
        for parameter in inspect.signature(function).parameters.values():
            own = fields.get(parameter.name, {parameter.name: parameter})
            parameters += own.values()

        @functools.wraps(function)
        def call(**given):
            for name, kind in several.items():
                own = {f: given.pop(f) for f in fields[name] if f in given}
                given[name] = kind.make(**own)
            return function(**given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in parameters]
        call.__signature__ = inspect.Signature(parameters)
        classes = (each for kind in several.values() for each in kind.classes)
        call.__doc__ = documented(inspect.getdoc(function) or "", *classes)
        return call

    return decorate
