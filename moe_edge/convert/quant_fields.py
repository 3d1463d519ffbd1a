"""Reading a `quantization_config` field by field; what nobody reads is refused."""

import json
from typing import Any, NoReturn

from moe_edge.core.checks import ConfigError


class QuantFields:
    """An object of a quantization_config that remembers which fields were used.

    Attributes:
      section: the object.
      where: its name for messages.
    """

    def __init__(self, section: dict[str, Any], where: str):
        self.section, self.where = section, where
        self._used = {"quant_method"}

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; a null is as good as none."""
        self._used.add(name)
        value = self.section.get(name)
        return default if value is None else value

    def ignore(self, *names: str) -> None:
        """Accepts fields that say nothing of what a stored weight means."""
        self._used.update(names)

    def only(self, name: str, allowed: tuple, default: Any = None) -> Any:
        """The value of a field, one of `allowed`."""
        value = self.get(name, default)
        if not any(type(value) is type(a) and value == a for a in allowed):
            self.refuse(name, value, " or ".join(map(json.dumps, allowed)))
        return value

    def whole(self, name: str, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self.get(name)
        if type(value) is not int or value < low:
            self.refuse(name, value, f"a whole number >= {low}")
        return value

    def pair(self, name: str, value: Any) -> tuple[int, int]:
        """Checks [rows, cols] of a block of weights."""
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(type(n) is not int or n < 1 for n in value)
        ):
            self.refuse(name, value, "[rows, cols]")
        return value[0], value[1]

    def group_size(self) -> int | None:
        """Inputs that share a scale; None (-1 in the file): all."""
        return None if self.get("group_size") == -1 else self.whole("group_size")

    def refuse(self, name: str, value: Any, expected: str) -> NoReturn:
        """Raises ConfigError of a field."""
        raise ConfigError(
            f"quantization_config of {self.where}: {name} is {json.dumps(value)[:80]}, "
            f"expected {expected}; convert from an unquantised copy of the model"
        )

    def finish(self) -> None:
        """Refuses every field that was not asked for; empty ones say nothing.

        Raises:
          ConfigError: names them with their values.
        """
        unknown = {
            name: value
            for name, value in self.section.items()
            if name not in self._used and value not in (None, {}, [])
        }
        if unknown:
            raise ConfigError(
                f"quantization_config of {self.where} has unknown fields "
                f"{json.dumps(unknown)[:120]}; convert from an unquantised copy of the "
                "model"
            )
