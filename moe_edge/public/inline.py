"""Where a CPU's programs run: a setting of the process, which its user makes."""

from moe_edge.core.checks import ConfigError


def run_inline() -> None:
    """From here on JAX runs programs of a CPU in the thread that calls them.

    Offloaded engines of mode layered, which wait for every layer's routing, are faster
    so; resident ones are slower (docs/performance.md). It is a setting of the process,
    and `Engine.stats` says which one is on. Call it before anything has started JAX.

    >>> import moe_edge as me
    >>> me.run_inline()
    >>> with me.load("default").offload("25%") as engine:
    ...     engine.stats()["inline"]
    True

    Raises:
      ConfigError: JAX has started.
    """
    from moe_edge.engine.inline import run_inline as begin

    if not begin():
        raise ConfigError(
            "JAX has started in this process and keeps how programs run; call "
            "run_inline before any engine is made"
        )
