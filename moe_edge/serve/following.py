"""A process that serves without clients: it does what process 0 does, step by step."""

import signal
from typing import Any

from moe_edge.engine.devices import DeviceOptions
from moe_edge.engine.lock_step import follow
from moe_edge.hosts.link import Link
from moe_edge.serve.loading import load_driver
from moe_edge.serve.options import ServingOptions
from moe_edge.serve.service import SIGNALS


def follow_server(
    link: Link,
    checkpoint: str,
    k: int | None,
    serving: ServingOptions,
    shared: DeviceOptions,
) -> dict[str, Any]:
    """Runs the steps of process 0 until it has drained.

    A signal here asks process 0 to drain: a scheduler may signal any process first, and
    none may leave before the others. A second one ends this process.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number, frame) -> None:
        link.ask_stop()
        signal.signal(number, before[number])

    driver = load_driver(checkpoint, k, None, serving, shared, link=link)
    with driver.slots.engine:
        for number in SIGNALS:
            signal.signal(number, ask)
        try:
            follow(driver.slots, link)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return {}
