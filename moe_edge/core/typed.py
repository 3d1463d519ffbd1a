"""Values and objects by annotated types: refused by name where they are of another."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_known

T = TypeVar("T")


def bare(kind: Any) -> Any:
    """An annotated type without what `Annotated` adds, at any depth."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return bare(args[0])
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(bare, args))]  # noqa: UP007
    if origin in (tuple, collections.abc.Sequence):
        return origin[tuple(map(bare, args))]
    return kind


def build_known(kind: str, classes, name: str, options):
    """An object of the dataclass called `name`, with these options.

    Args:
      kind: what it is, for the message.
      classes: name -> dataclass.
    Raises:
      ConfigError: unknown name or option, listing what is; an option of another type;
        or what the class refuses.
    """
    check_known(kind, name, classes)
    check_options(name, classes[name], options)
    return classes[name](**options)


def check_options(name: str, kind: type, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that a dataclass lacks, or of another type.

    Args:
      name: of the thing, for the message.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(kind) if field.init}
    for option, value in options.items():
        if option not in kinds:
            known = ", ".join(kinds) or "none"
            raise ConfigError(f"{name} has no option {option!r}; known: {known}")
        _check_type(f"{name}: {option}", value, kinds[option])


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass's object that differ from their defaults, by name."""
    found = {}
    for field in dataclasses.fields(options):
        made = field.default_factory is not dataclasses.MISSING
        value = getattr(options, field.name)
        if value != (field.default_factory() if made else field.default):
            found[field.name] = value
    return found


def built(name: str, kind: type[T], given: Any, ignore_more: bool = False) -> T:
    """An object of a dataclass from a parsed file.

    Args:
      name: of the thing, for the message.
      ignore_more: whether it may say more than the class has fields for.
    Raises:
      ConfigError: no mapping, a field that is missing, unknown or of another type; or
        what the class refuses.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r:.60}, expected names and values")
    fields = [field for field in dataclasses.fields(kind) if field.init]
    if ignore_more:
        given = {f.name: given[f.name] for f in fields if f.name in given}
    empty = dataclasses.MISSING
    for field in fields:
        needed = field.default is empty and field.default_factory is empty
        if needed and field.name not in given:
            raise ConfigError(f"{name} lacks {field.name}")
    check_options(name, kind, given)
    return kind(**given)


def checked(name: str, function: Callable) -> Callable:
    """The function, refusing arguments of another type than its signature says.

    Args:
      name: of the function, for the message.
    Raises (the result):
      ConfigError: parameters that have no value; the first argument of another type, or
        a whole number beyond 64 bits.
    """
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    needed = [p.name for p in signature.parameters.values() if p.default is empty]

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        arguments = signature.bind_partial(*args, **kwargs).arguments
        if unset := [f"--{name}" for name in needed if name not in arguments]:
            raise ConfigError(
                f"no value for {', '.join(unset)}: give it as a flag or in gin"
            )
        for given, value in arguments.items():
            kind = signature.parameters[given].annotation
            _check_type(f"{name}.{given}", value, kind)
        return function(*args, **kwargs)

    call.__signature__ = signature
    del call.__wrapped__  # gin would call that a class, where it is one
    return call


def _check_type(name: str, value, kind) -> None:
    if not _is_of(value, kind):
        name, value, kind = _wrong_part(name, value, kind)
        raise ConfigError(f"{name} is {value!r}, expected {_kind_text(kind)}")
    check_64_bits(name, value)


def _wrong_part(name: str, value, kind) -> tuple[str, Any, Any]:
    """What of a value is of another type: of a mapping an entry, else all of it."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    for one in typing.get_args(kind) if union else (kind,):
        args = typing.get_args(one)
        if len(args) == 2 and isinstance(value, Mapping):
            for key, item in value.items():
                if _is_of(key, args[0]) and not _is_of(item, args[1]):
                    return _wrong_part(f"{name}: {key!r}", item, args[1])
    return name, value, kind


def check_64_bits(name: str, value) -> None:
    """Raises ConfigError for a whole number beyond 64 bits, also inside of lists."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            check_64_bits(name, item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(
            f"{name} is {value}, expected a whole number of at most 64 bits"
        )


def _is_of(value, kind) -> bool:
    """Whether a value is of an annotated type; True where that cannot be told."""
    value = value.item() if isinstance(value, np.generic) else value
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, one) for one in args)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (list, collections.abc.Sequence):
        if isinstance(value, (list, tuple)):
            return all(_is_of(item, args[0]) for item in value)
        return isinstance(value, (np.ndarray, range))
    if origin is not None:
        if not isinstance(origin, type):
            return True
        if not isinstance(value, origin):
            return False
        if isinstance(value, Mapping) and len(args) == 2:
            return all(
                _is_of(key, args[0]) and _is_of(item, args[1])
                for key, item in value.items()
            )
        return True
    if kind in (None, type(None)):
        return value is None
    if not isinstance(kind, type) or kind in (Any, object, inspect.Parameter.empty):
        return True  # or the name of a type as text
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))


_WORDS = {
    str: "a text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    types.NoneType: "None",
    collections.abc.Mapping: "options {'name': value}",
    dict: "options {'name': value}",
    collections.abc.Callable: "a function",
}


def _kind_text(kind) -> str:
    """An annotated type in words that gin's users know."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_kind_text, args))
    if (origin or kind) in _WORDS:
        return _WORDS[origin or kind]
    if origin in (list, tuple, collections.abc.Sequence):
        name = "tuple" if origin is tuple else "list"
        return f"a {name} ({_kind_text(args[0])} each)" if args else f"a {name}"
    return getattr(origin or kind, "__name__", str(kind))
