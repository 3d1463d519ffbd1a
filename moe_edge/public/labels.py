"""How tables name their cases: a policy with the options that are not its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import Registry, is_object


def label(
    registry: Registry, given: Any, options: Mapping[str, Any] | None = None
) -> str:
    """A policy's name with its options; an object's that are not its class's own.

    Args:
      options: of a name or a class (`eviction_options`, ...).
    """
    kind: Any = registry.class_of(given)
    values = dict(options or {})
    if is_object(given) and dataclasses.is_dataclass(given):
        values = {
            field.name: getattr(given, field.name)
            for field in dataclasses.fields(given)
            if field.init and field.repr and field.compare
            if not _is_default(field, given)
        }
    said = [f"{name}={value!r:.20}" for name, value in values.items()]
    return f"{kind.name}({', '.join(said)})" if said else kind.name


def _is_default(field: dataclasses.Field, given: Any) -> bool:
    value, default = getattr(given, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return value is default or repr(value) == repr(default)


def listed(name: str, given: Any) -> list[Any]:
    """What was given as a list; ConfigError for something else, or nothing."""
    if isinstance(given, (list, tuple)) and given:
        return list(given)
    raise ConfigError(f"{name} is {given!r:.60}, expected a list with something in it")
