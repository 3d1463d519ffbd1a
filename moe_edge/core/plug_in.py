"""Plug-ins: policies of six kinds, given by name, as a class, or as an object.

Every kind has a base class, which states its contract, and a `Registry` beside it. A
class registers itself with `@register`; its base says its kind, its fields are its
options. Ours stand in the kind's folder, or in the room of a paper whose table names
them (core/tables.py). Another author's package names its classes in entry points of the
group `moe_edge.policies`. Both are imported when one of these names is asked for;
entry points also when all names are.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from moe_edge.core import tables
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.context import Context
from moe_edge.core.entry_points import REMEDY, entry_points, load, origin, warn
from moe_edge.core.plug_in_options import needed
from moe_edge.core.typed import check_options

EXPECTED = "a subclass of Eviction, Predictor, Route, Assist, Placer or Scheduler"
_MARK = "\n@register\n"
Class = TypeVar("Class", bound=type)
_REGISTRIES: list["Registry"] = []


class PlugIn:
    """Base of the bases. A subclass without a `name` of its own is named by its class,
    never by its parent's name: what it is called says what it is.

    Attributes:
      name: by which it is asked for.
      SOURCE: the paper or the idea that it is after.
      required: methods and properties that every subclass must write.
      from_context: {option: what of the run fills it, unless it is given}; every kind
        says what a run has (core/context.py).
    """

    name: ClassVar[str]
    SOURCE: ClassVar[str] = ""
    required: ClassVar[tuple[str, ...]] = ()
    from_context: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__


def register(found: Class) -> Class:
    """Decorator of a class of one of the six bases: from here on its name means it.

    >>> @me.register
    ... class Patient(me.Eviction):
    ...     name = "patient"
    >>> from moe_edge.engine.offload_options import OffloadOptions
    >>> OffloadOptions(eviction="patient").eviction
    'patient'

    Args:
      found: the class.
    Returns:
      the class itself.
    Raises:
      ConfigError: another base, or another class of that kind has the name.
    """
    for registry in _REGISTRIES:
        if isinstance(found, type) and issubclass(found, registry.base):
            return registry.add(found)
    raise ConfigError(f"{found!r:.60} is no plug-in, expected {EXPECTED}")


def is_object(given: Any) -> bool:
    """Whether a plug-in was given as an object, which is used itself."""
    return not isinstance(given, (str, type))


def is_ours(plug_in: Any) -> bool:
    """Whether a class, or the class of an object, ships with this package, whose tests
    know what it does."""
    found = plug_in if isinstance(plug_in, type) else type(plug_in)
    return _package_of(found) == _package_of(PlugIn)


def _package_of(found: type) -> str:
    return found.__module__.partition(".")[0]


class Registry(Mapping[str, type[Any]]):
    """The plug-ins of one kind: name -> class, sorted.

    Attributes:
      kind: what they are, for messages.
      base: their base class.
      option: the argument that takes their options, for messages.
      folder: package in which ours stand, in files that say `@register`.

    Its kind in the tables of papers is the name of its base, in lower case.
    """

    def __init__(self, kind: str, base: type, option: str, folder: str):
        self.kind, self.base, self.option, self.folder = kind, base, option, folder
        self._classes: dict[str, type] = {}
        _REGISTRIES.append(self)

    def add(self, found: Class) -> Class:
        """As `register`. A class that is defined again takes its own place."""
        if _package_of(found) != _package_of(PlugIn):
            self._import_ours(found.name)  # which have their names first
        before = self._classes.get(found.name, found)
        if _place(before) != _place(found):
            raise ConfigError(
                f"two classes of {self.kind} have the name {found.name!r}, "
                f"{'.'.join(_place(before))} and {'.'.join(_place(found))}; give each "
                "its own"
            )
        self._classes[found.name] = found
        return found

    # --- names

    def __getitem__(self, name: str) -> type[Any]:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        self._import_ours()
        others = [name for name in entry_points() if self._is_sound(name)]
        return iter(sorted({*self._classes, *self._of_papers(), *others}))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find(self, name: str) -> type | None:
        """The class of a name; None: of this kind there is none.

        Raises:
          ConfigError: an entry point of this name cannot be loaded, or several classes
            have it.
        """
        self._import_ours(name)
        for point in entry_points().get(name, ()):
            try:
                found = register(load(point))
            except ConfigError as error:
                raise ConfigError(f"{origin(point)}: {error}; {REMEDY}") from error
            if found.name != name:
                raise ConfigError(
                    f"{origin(point)} has the name {found.name!r}, expected that of "
                    f"its entry point; {REMEDY}"
                )
        return self._classes.get(name)

    def _is_sound(self, name: str) -> bool:
        """Whether a name of another package is of this kind; says what is broken."""
        try:
            return self._find(name) is not None
        except ConfigError as error:
            warn(f"warning: {error}")
            return False

    def _import_ours(self, name: str | None = None) -> None:
        """Imports what stands in the folder, and what a paper has of that name."""
        for module in _modules_of(self.folder):
            importlib.import_module(module)
        if place := self._of_papers().get(name):
            self.add(tables.load(place))

    def _of_papers(self) -> Mapping[str | None, str]:
        return tables.plugins(self.base.__name__.lower())

    # --- what was given

    def class_of(self, given: Any) -> type[Any]:
        """The class of a name, a class, or an object.

        Raises:
          ConfigError: an unknown name (the known ones are listed), something else, or a
            class that has another one's name or lacks what its base requires.
        """
        if isinstance(given, str):
            check_known(self.kind, given, self)
            found = self[given]
        else:
            found = given if isinstance(given, type) else type(given)
            is_known = found in self._classes.values()
            if not issubclass(found, self.base) or (
                found is self.base and not is_known
            ):
                raise ConfigError(
                    f"{self.kind} is {given!r:.60}, expected a name "
                    f"({', '.join(self)}), or an object or subclass of "
                    f"{self.base.__name__}"
                )
        base = self.base
        lacks = [
            name
            for name in base.required
            if getattr(found, name, None) is getattr(base, name)  # a field has none
        ]
        if lacks:
            raise ConfigError(
                f"{self.kind} {found.__qualname__} lacks {', '.join(lacks)}; "
                f"help({base.__module__}.{base.__name__}) says what each one is"
            )
        before = self._find(found.name) or found
        if _place(before) != _place(found):
            owner = "which ships with moe_edge"
            if _package_of(before) != _package_of(PlugIn):
                owner = f"which is {'.'.join(_place(before))}"
            raise ConfigError(
                f"{self.kind} {found.__qualname__} has the name {found.name!r} of "
                f"another class, {owner}; give it a name of its own"
            )
        return found

    def check(
        self, given: Any, options: Mapping[str, Any], later: Collection[str] = ()
    ) -> None:
        """Refuses what `make` would refuse, before all options are there.

        Args:
          later: options that the run adds.
        """
        found = self.class_of(given)
        if is_object(given):
            if options:
                raise ConfigError(
                    f"{self.kind} {found.name} was given as an object and "
                    f"{self.option} {', '.join(options)} beside it; set them where the "
                    "object is made"
                )
            return
        what = f"{self.kind} {found.name}"
        if not dataclasses.is_dataclass(found):
            if options:
                raise ConfigError(
                    f"{what} is no dataclass and takes no {self.option}, got "
                    f"{', '.join(options)}; give an object instead"
                )
            return
        check_options(what, found, options)
        if missing := [n for n in needed(found) if n not in {*options, *later}]:
            raise ConfigError(
                f"{what} got no {', '.join(missing)}; give it in {self.option}"
            )

    def make(
        self, given: Any, options: Mapping[str, Any], context: Context | None = None
    ) -> Any:
        """The object: itself, or made of its class.

        Args:
          context: what the run can give to a class that asks (`from_context`).
        Raises:
          ConfigError: as `class_of` and `check`, or what the class refuses.
        """
        if context is not None and not is_object(given):
            options = context.fill(self.class_of(given), options)
        self.check(given, options)
        if is_object(given):
            return given
        kind = self.class_of(given)
        if isinstance(given, str):
            return kind(**options)
        try:
            return kind(**options)
        except TypeError as error:
            raise ConfigError(
                f"{self.kind} class {kind.__qualname__} cannot be made without "
                f"arguments: {error}; give an object instead of the class"
            ) from error


def _place(found: type) -> tuple[str, str]:
    """Where a class is defined: the same when it is defined again."""
    return found.__module__, found.__qualname__


@functools.cache
def _modules_of(folder: str) -> list[str]:
    """Modules of a package in which something registers itself."""
    package = importlib.import_module(folder)
    found = []
    for info in pkgutil.iter_modules(package.__path__, f"{folder}."):
        source = info.module_finder.find_spec(info.name).loader.get_source(info.name)
        if source is None or _MARK in source:  # None: bytecode alone
            found.append(info.name)
    return found
