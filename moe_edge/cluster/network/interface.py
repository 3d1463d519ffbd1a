"""Bytes that this process's network namespace has sent, as its interface counts them.

On an emulated network a node has a namespace with one interface of its own, so they are
this process's: calls and all else, with headers of packets.
"""

from pathlib import Path

_SENT = 8  # column of `/proc/net/dev` after the name: bytes sent


def sent_bytes(device: str) -> int:
    """What a device has sent since it was made.

    Raises:
      OSError: the machine does not tell (not Linux), or has no such device.
    """
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    for line in lines:
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[_SENT])
    raise OSError(f"there is no network interface {device!r} in /proc/self/net/dev")


class Interface:
    """Counts from `reset` on.

    Args:
      device: name of the interface; None: nothing is counted.
    """

    def __init__(self, device: str | None = None):
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Counts from now on."""
        self._start = 0 if self._device is None else sent_bytes(self._device)

    @property
    def sent(self) -> int | None:
        """Bytes; None if nothing is counted."""
        if self._device is None:
            return None
        return sent_bytes(self._device) - self._start
