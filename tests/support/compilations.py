"""What JAX traces, lowers and compiles while a block runs."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """A list of what is done, and to which function; it grows as the block runs."""
    seen: list[str] = []

    def note(event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(f"{event.rpartition('/')[2]} {fun_name}")

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
