"""Policies, predictors and routes given by name, as a class, or as an object.

A name is looked up; a class is instantiated with its options; an object is used itself.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from moe_edge.core.checks import ConfigError, check_known, check_options
from moe_edge.core.context import Context


class Named:
    """Base of plug-ins. A subclass without a `name` of its own is named by its class,
    never by its parent's name: what it is called says what it is.

    Attributes:
      required: methods and properties that every subclass must write.
    """

    required: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__


def is_object(given: Any) -> bool:
    """Whether a plug-in was given as an object, which is used itself."""
    return not isinstance(given, (str, type))


@dataclasses.dataclass(frozen=True)
class Registry:
    """The plug-ins of one kind.

    Attributes:
      kind: what they are, for messages.
      base: their base class.
      known: name -> class.
      option: the argument that takes their options, for messages.
    """

    kind: str
    base: type
    known: Mapping[str, type]
    option: str

    def class_of(self, given: Any) -> type:
        """The class of a name, a class, or an object.

        Raises:
          ConfigError: an unknown name (the known ones are listed), something else, or a
            class that has another one's name or lacks what its base requires.
        """
        if isinstance(given, str):
            check_known(self.kind, given, self.known)
            return self.known[given]
        found = given if isinstance(given, type) else type(given)
        is_known = found in self.known.values()
        if not issubclass(found, self.base) or (found is self.base and not is_known):
            raise ConfigError(
                f"{self.kind} is {given!r:.60}, expected a name "
                f"({', '.join(sorted(self.known))}), or an object or subclass of "
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
        if self.known.get(found.name, found) is not found:
            raise ConfigError(
                f"{self.kind} {found.__qualname__} has the name {found.name!r} of "
                "another class, which ships with moe_edge; give it a name of its own"
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
        fields = [field for field in dataclasses.fields(found) if field.init]
        needed = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing := [n for n in needed if n not in options and n not in later]:
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
