"""What a user's type checker sees of `import moe_edge`; mypy reads it (.ci/run), and
an `ignore` that is not needed is an error: each names a mistake that must be found."""

from collections.abc import Iterator
from typing import Any, assert_type

import moe_edge as me


class Last(me.Eviction):
    """Gives up the last slot."""

    def victim(self, state: dict[str, Any], protected_S: Any) -> tuple[Any, Any]:
        return len(protected_S) - 1, state


def use() -> None:
    model = me.load("default")
    with model.offload("25%", eviction=Last()) as engine:
        assert_type(engine, me.Engine)
        assert_type(engine.generate("Once"), me.Output)
        assert_type(engine.generate([1, 2]), me.Output)
        assert_type(engine.generate(["Once", "One day"]), list[me.Output])
        assert_type(engine.generate([[1, 2], [3]], 4, stop="."), list[me.Output])
        assert_type(engine.stream("Once"), Iterator[tuple[int, int, str]])
        assert_type(engine.generate("Once").stats["hit_ratio"], Any)
        engine.generate("Once", temprature=1.0)  # type: ignore[call-overload]
        engine.chat([{"role": "user"}], top_k="3")  # type: ignore[arg-type]
        engine.generate(3)  # type: ignore[call-overload]
    me.replay(engine.trace, budgets=["10%", 0.25], evictions=[Last, "lru"])
    me.replay(engine)  # type: ignore[arg-type]
    me.lode("default")  # type: ignore[attr-defined]
