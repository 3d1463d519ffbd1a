"""gin files are data here: they are read and checked before gin takes them.

What would run code, what cannot be parsed, and names that mean nothing are refused with
the file and the line.
"""

import dataclasses
import inspect
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from moe_edge.bench.registry import STUDIES
from moe_edge.configurables import COMMANDS
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import decode_utf8
from moe_edge.core.suggest import unknown

# What gin raises for a bad file or binding.
GIN_ERRORS = (
    *(ValueError, TypeError, NameError, SyntaxError, RuntimeError),
    tokenize.TokenError,
)
BY_FLAG = "--gin_param"
VALUES = (
    "a number, a text in quotes, True, False, None, a list, a dict, @offload() or %K"
)


class Reference(NamedTuple):
    """`@scope/name` in a value."""

    scope: str
    name: str


class Macro(NamedTuple):
    """`%name` in a value."""

    name: str


class _Marks(config_parser.ParserDelegate):
    """Builds nothing but marks: only names and kinds of statements matter here."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name.rpartition(".")[2])

    def macro(self, macro_name):
        return Macro(macro_name)


class Binding(NamedTuple):
    """`scope/name.parameter = value`, or a macro: `name = value`.

    Attributes:
      where: file (or --gin_param) and line.
      by_flag: whether it was given by --gin_param itself.
    """

    where: str
    by_flag: bool
    scope: str
    name: str
    parameter: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Names:
    """What bindings of one command may name.

    Attributes:
      read: names whose parameters the command reads: its own first.
      others: names that other commands read.
      options: names that a value may refer to, as in `@offload()`.
      find: the function behind one of `read`.
      macros: those that are defined without a binding.
    """

    read: Sequence[str]
    others: Collection[str]
    options: Collection[str]
    find: Callable[[str], Callable]
    macros: Collection[str]

    def parameters(self, name: str) -> list[str]:
        """What can be bound of one of `read`; gin itself gives `config_text`."""
        known = inspect.signature(self.find(name)).parameters
        return [parameter for parameter in known if parameter != "config_text"]


def check_settings(files: Iterable[str], bindings: Iterable[str], names: Names) -> None:
    """Refuses what gin would not understand, ignore, or run.

    Args:
      files, bindings: what --gin_file and --gin_param say.
    Raises:
      ConfigError: an import, a statement that cannot be parsed, a name that no command
        reads (in --gin_param: that this one does not read), a parameter, reference,
        macro or scope that does not exist; a file that cannot be read.
    """
    found: list[Binding] = []
    for binding in bindings:
        found += _bindings(binding, BY_FLAG, ())
    for file in files:
        found += _file_bindings(file, ())
    marks = [mark for one in found for mark in _marks(one.value)]
    scopes = {mark.scope for mark in marks if isinstance(mark, Reference)}
    given = (one for one in found if not one.parameter)
    macros = {f"{one.scope}/{one.name}".lstrip("/") for one in given}
    macros |= {*names.macros, "gin.REQUIRED"}
    for one in found:
        if not one.parameter or _is_read(one, names, scopes):
            for mark in _marks(one.value):
                if isinstance(mark, Reference):
                    what = "reference"
                    _check_known(one.where, what, mark.name, names.options)
                elif mark.name not in macros:
                    raise ConfigError(
                        f"{one.where}: macro %{mark.name} has no value; write "
                        f"`{mark.name} = VALUE`, or give --seed for SEED"
                    )


def _is_read(one: Binding, names: Names, scopes: Collection[str]) -> bool:
    """Whether the command reads a binding; refuses one that no command reads."""
    name = one.name.rpartition(".")[2]
    studies = STUDIES.keys() - names.read - COMMANDS.keys()  # too many to list
    _check_known(one.where, "name", name, {*names.read, *names.others}, studies)
    if name not in names.read:
        if one.by_flag:
            raise ConfigError(
                f"{one.where}: {name}.{one.parameter} means nothing to "
                f"{names.read[0]}, which reads {', '.join(names.read)}; leave it out"
            )
        return False  # a file may serve several commands
    what, parameters = f"parameter of {name}:", names.parameters(name)
    _check_known(one.where, what, one.parameter, parameters)
    if one.scope not in {"", *scopes}:
        raise ConfigError(
            f"{one.where}: no reference has the scope {one.scope!r}, so this binding "
            "would have no effect; leave the scope out"
        )
    return True


def _check_known(
    where: str, kind: str, name: str, known: Collection[str], hidden=()
) -> None:
    """Refuses an unknown name, listing what is known but for the `hidden` ones."""
    if name not in known:
        raise ConfigError(f"{where}: {unknown(kind, name, known, hidden)}")


def _marks(value) -> Iterator[Reference | Macro]:
    """All references and macros inside a value."""
    if isinstance(value, (Reference, Macro)):
        yield value  # before tuples: marks are such
    elif isinstance(value, (list, tuple, dict)):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        for item in value:
            yield from _marks(item)


def _file_bindings(name: str, open_files: tuple[Path, ...]) -> Iterator[Binding]:
    path = Path(name).resolve()
    if path in open_files:
        raise ConfigError(f"gin file {name} includes itself; remove the include")
    try:
        text = decode_utf8(f"gin file {name}", path.read_bytes())
    except OSError as error:  # gin would look for it among Python packages
        raise ConfigError(
            f"gin file {name} cannot be read: {error.strerror}; check the path"
        ) from error
    yield from _bindings(text, name, (*open_files, path))


def _bindings(text: str, where: str, open_files: tuple[Path, ...]) -> Iterator[Binding]:
    for statement in _statements(text, where):
        place = f"{where}:{statement.location.line_num}"
        if isinstance(statement, config_parser.ImportStatement):
            raise ConfigError(
                f"{place}: import {statement.module!r} would run code; a gin file "
                "holds settings only, so remove it"
            )
        if isinstance(statement, config_parser.IncludeStatement):
            yield from _file_bindings(statement.filename, open_files)
        if isinstance(statement, config_parser.BindingStatement):
            yield Binding(place, where == BY_FLAG, *statement[:4])


def _statements(text: str, where: str) -> Iterator:
    """The statements of a text.

    Raises:
      ConfigError: it cannot be parsed, with the line.
    """
    parser, line = None, 1
    try:
        parser = config_parser.ConfigParser(text, _Marks())
        yield from parser
    except ConfigError:
        raise
    except GIN_ERRORS as error:
        if isinstance(error, SyntaxError) and error.lineno:
            line = error.lineno
        elif parser is not None:
            line = parser.current_token.start[0]
        raise ConfigError(f"{where}:{line}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong with a statement, in words."""
    if isinstance(error, RecursionError):
        return "the value is nested too deeply"
    text = error.msg if isinstance(error, SyntaxError) else str(error.args[0])
    if token := re.search("Failed to parse token '(.*)'", text, re.DOTALL):
        return f"{token[1]} is no value; expected {VALUES}"
    if text.startswith("Unable to parse value"):
        return f"a value is missing or malformed; expected {VALUES}"
    if text.startswith("Couldn't parse statement"):
        return "expected `name.parameter = value`"
    if text.startswith("EOF in"):
        return "a bracket or a quote is not closed"
    return text.partition(".")[0].lower()
