"""The folder of one run, and the functions behind scripts ("roots") that write one."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import atomic_folder, check_apart, check_out_dir

CONFIG_NAME = "config.gin"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and how.

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
        check_out_dir(self.out_dir, self.overwrite)

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
    def writing(self) -> Iterator[Path]:
        """Yields a temporary folder that, with config.gin, becomes `path` at the end.

        On an exception it is removed, and `path` stays as it was.
        """
        with atomic_folder(self.out_dir, self.overwrite) as folder:
            yield folder
            if text := self.config_text():  # none where no script called
                (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


_FIELDS = [field.name for field in dataclasses.fields(RunFolder)]


def _keywords(kind: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as keyword parameters."""
    missing, empty = dataclasses.MISSING, inspect.Parameter.empty
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=field.type,
            default=empty if field.default is missing else field.default,
        )
        for field in dataclasses.fields(kind)
    ]


def root(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Makes a root of `function(run: RunFolder, *, ...)`: what a script calls.

    A root takes keywords only: those of the function, and instead of `run` the
    attributes of `RunFolder`. Its summary is the function's with `out_dir` at the end
    (unless it says None: nothing was written) and, of a dry run, `dry_run` first.

    Raises (the root):
      ConfigError: a parameter without a default has no value.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    required = [p.name for p in own if p.default is p.empty]

    @functools.wraps(function)
    def call(**arguments) -> dict[str, Any]:
        unset = [name for name in ("out_dir", *required) if name not in arguments]
        if unset:
            names = ", ".join(f"--{name}" for name in unset)
            raise ConfigError(f"no value for {names}: give it as a flag or in gin")
        given = {name: arguments.pop(name) for name in _FIELDS if name in arguments}
        run = RunFolder(**given)
        summary = function(run, **arguments)
        first = {"dry_run": True} if run.dry_run else {}
        return first | summary | {"out_dir": summary.get("out_dir", str(run.out_dir))}

    folder = _keywords(RunFolder)
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    call.__signature__ = inspect.Signature([folder[0], *own, *folder[1:]])
    del call.__wrapped__  # gin would read the signature of that
    return call


def unpacked(**kinds: type) -> Callable[[Callable], Callable]:
    """Lets callers give the fields of dataclasses where a function takes objects.

    Args:
      kinds: parameter -> dataclass. Callers, gin and flags see its fields in place of
        the parameter, with the text that its `Attributes` say of them; options need no
        second list in a signature.
    """

    def decorate(function: Callable) -> Callable:
        parameters = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in kinds:
                parameters.append(parameter)
                continue
            parameters += _keywords(kinds[parameter.name])
        fields = {
            name: [field.name for field in dataclasses.fields(kind)]
            for name, kind in kinds.items()
        }

        @functools.wraps(function)
        def call(*arguments, **given):
            for name, kind in kinds.items():
                own = {f: given.pop(f) for f in fields[name] if f in given}
                given[name] = kind(**own)
            return function(*arguments, **given)

        call.__signature__ = inspect.Signature(parameters)
        classes = (base for kind in kinds.values() for base in kind.__mro__[-2::-1])
        documents = map(inspect.getdoc, (function, *classes))
        call.__doc__ = "\n\n".join(filter(None, documents))  # flags' help is in there
        return call

    return decorate
