"""What a run can give to its policies: each thing made when it is first asked for.

A policy, predictor or slot plan declares in `from_context` which of its options come
from where ({option: name}); engines and replay say what they have. So neither side has
to know the other by name.
"""

from collections.abc import Callable, Mapping
from typing import Any


class Context:
    """Things by name; each is made once.

    Args:
      **makers: makes what is called so.
    """

    def __init__(self, **makers: Callable[[], Any]):
        self._makers, self._made = makers, {}

    def __contains__(self, name: str) -> bool:
        return name in self._makers

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def also(self, **makers: Callable[[], Any]) -> "Context":
        """With more things; what has been made is not made again."""
        context = Context(**self._makers, **makers)
        context._made |= self._made
        return context

    def fill(self, kind, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a policy, with what it takes from here unless it is given."""
        return {
            option: self[name]
            for option, name in kind.from_context.items()
            if option not in options and name in self
        } | dict(options)
