"""A slow network on one machine: a network namespace a node, joined by shaped links.

Every node has an interface of its own, on a bridge in one more namespace, so nothing of
it is visible outside. What a node sends is shaped by `tbf` (a token bucket) to so many
Mbit/s, in each direction between two nodes therefore; small messages are shaped too,
because the bucket is small. Processes are started inside with `ip netns exec`, which
also shows them a hosts file of the nodes' names.

Only Linux, as root. Namespaces that a killed run left are removed by the next one.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_edge.cluster.network.proof import transfer_s
from moe_edge.core.checks import ConfigError, check_positive

PROOF_BYTES = 4 * 2**20
TOLERANCE = 0.15
ATTEMPTS = 5  # others may use the machine
MOST_NODES = 200
_BURST_S = 150e-6  # of the line's rate, what may pass at once; less costs throughput
_LEAST_BURST = 3200  # bytes, two packets
_QUEUE_S = 0.02  # of the line's rate, what may wait
_MTU = "1500"  # of lo too: with its 65536 some messages wait for an ACK of 40 ms
DEVICE = "eth0"  # of a node, its only link
_NETNS, _HOSTS = Path("/run/netns"), Path("/etc/netns")


class EmulatedNetwork:
    """Nodes that exist now.

    Attributes:
      names: of the nodes.
      mbps: what each may send; None if not limited.
      proof_s: of each node, measured seconds of 4 MiB to the next one; empty if not
        limited.
    """

    def __init__(self, names: Sequence[str], mbps: float | None, prefix: str):
        self.names, self.mbps, self._prefix = tuple(names), mbps, prefix
        self.proof_s: dict[str, float] = {}

    @property
    def ideal_s(self) -> float:
        """Of the proof, were all that is sent payload."""
        return PROOF_BYTES * 8 / (self.mbps * 1e6)

    def command(self, name: str) -> list[str]:
        """Words to put before a command, so that it runs in a node."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def address(self, name: str) -> str:
        """Of a node, for the others."""
        self._check(name)
        return f"10.77.0.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        """Of a node; its file is in /run/netns."""
        self._check(name)
        return f"{self._prefix}.{name}"

    def _check(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(self.names)
            raise ConfigError(f"no node {name!r} in the network; known: {known}")

    def build(self) -> None:
        """Makes namespaces, bridge and links."""
        switch = f"{self._prefix}.-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        nodes = [f"{self.address(name)} {name}" for name in self.names]
        for number, name in enumerate(self.names):
            node, port = self.namespace(name), f"port{number}"
            hosts = _HOSTS / node / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            own = f"{self.address(name)} {socket.gethostname()}"  # what gloo binds to
            lines = ["127.0.0.1 localhost", own, *nodes]
            hosts.write_text("\n".join(lines) + "\n", encoding="utf-8")
            _run("ip", "netns", "add", node)
            peer = ["type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "link", "add", DEVICE, "netns", node, *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            address = f"{self.address(name)}/24"
            _run("ip", "-n", node, "addr", "add", address, "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", node, "link", "set", device, "mtu", _MTU, "up")
            if self.mbps is not None:
                _run("tc", "-n", node, *shaping(DEVICE, self.mbps))

    def prove(self) -> None:
        """Sends 4 MiB from every node to the next one.

        Raises:
          ConfigError: it does not take as long as the rate says, in any attempt.
        """
        self.proof_s = {}
        for name, other in zip(self.names, (*self.names[1:], self.names[0])):  # noqa: B905
            if name == other:
                continue
            for _ in range(ATTEMPTS):
                seconds = self._transfer_s(name, other)
                if abs(seconds / self.ideal_s - 1) <= TOLERANCE:
                    break
            else:
                raise ConfigError(
                    f"the emulated link from {name} to {other} carried 4 MiB in "
                    f"{seconds * 1e3:.1f} ms, expected {self.ideal_s * 1e3:.1f} at "
                    f"{self.mbps:g} Mbit/s, within {TOLERANCE:.0%}; use a quieter "
                    "machine or a lower rate"
                )
            self.proof_s[name] = seconds

    def _transfer_s(self, sender: str, receiver: str) -> float:
        paths = [_NETNS / self.namespace(name) for name in (sender, receiver)]
        within_s = 10 + 10 * self.ideal_s
        return transfer_s(*paths, self.address(receiver), PROOF_BYTES, within_s)


@contextlib.contextmanager
def emulated_network(
    names: Sequence[str], mbps: float | None, *, prefix: str = "moe-edge"
) -> Iterator[EmulatedNetwork]:
    """Makes a network, proves its rate, and removes it in any case.

    Processes started inside are the caller's to end. SIGTERM is an exception meanwhile,
    where nobody else handles it.

    Args:
      names: of the nodes: letters, digits, `_`.
      mbps: 10^6 bits a second that a node may send, headers included; None: no limit.
      prefix: of the namespaces; of two runs with one prefix the second is refused.
    Raises:
      ConfigError: missing rights or programs, bad names, a rate that cannot be kept, or
        a network of this prefix in use.
    """
    _check_names(names, prefix)
    if mbps is not None:
        check_positive("link_mbps", mbps)
    if reason := missing_rights():
        raise ConfigError(f"link_mbps needs an emulated network: {reason}")
    network = EmulatedNetwork(names, mbps, prefix)
    with _only_one(prefix), _terminable():
        _remove(prefix)
        try:
            network.build()
            if mbps is not None:
                network.prove()
            yield network
        finally:
            _remove(prefix)


def missing_rights() -> str | None:
    """Why this process cannot make networks, in one line; None if it can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}; install iproute2"
    if os.geteuid() != 0:
        return f"only root may make namespaces, this is user {os.geteuid()}; use sudo"
    probe = f"moe-edge-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        try:
            peer = ["type", "veth", "peer", "name", "eth1"]
            _run("ip", "-n", probe, "link", "add", "eth0", *peer)
            _run("tc", "-n", probe, *shaping("eth0", 100.0))
        finally:
            _run("ip", "netns", "del", probe)
    except ConfigError as error:
        return f"{error}; it takes CAP_SYS_ADMIN, CAP_NET_ADMIN, veth and tbf"
    return None


def shaping(device: str, mbps: float) -> list[str]:
    """Arguments of `tc` that shape what a device sends."""
    byte_rate = mbps * 1e6 / 8
    burst = max(_LEAST_BURST, int(byte_rate * _BURST_S))
    limit = burst + max(2 * _LEAST_BURST, int(byte_rate * _QUEUE_S))
    bucket = ["rate", f"{int(mbps * 1e6)}bit", "burst", str(burst), "limit", str(limit)]
    return ["qdisc", "add", "dev", device, "root", "tbf", *bucket]


def _check_names(names: Sequence[str], prefix: str) -> None:
    for name in (*names, prefix.replace("-", "_")):
        if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", name):
            raise ConfigError(f"name {name!r} of a node, expected letters, digits, _")
    if len(set(names)) != len(names) or not 1 <= len(names) <= MOST_NODES:
        raise ConfigError(
            f"{len(names)} nodes: {', '.join(names)}, expected 1 to {MOST_NODES} "
            "different names"
        )


@contextlib.contextmanager
def _only_one(prefix: str) -> Iterator[None]:
    """Keeps other processes from networks of a prefix; the lock goes with us."""
    path = Path(tempfile.gettempdir()) / f"{prefix}.network.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another run uses the emulated network {prefix!r}; wait for its end"
        ) from error
    finally:
        os.close(lock)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit(143), where it would end the process at once."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number, frame) -> None:
    raise SystemExit(128 + number)


def _remove(prefix: str) -> None:
    """Removes all of a prefix, also what an earlier run left; not interrupted."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        for path in _NETNS.glob(f"{prefix}.*"):
            _run("ip", "netns", "del", path.name)
        for path in _HOSTS.glob(f"{prefix}.*"):
            shutil.rmtree(path)
        if _HOSTS.is_dir() and not any(_HOSTS.iterdir()):
            _HOSTS.rmdir()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"`{' '.join(words)}` failed: {said}")
