"""Sockets of the `messages` transport: their keys, limits, heartbeats and addresses."""

import errno
import os
import socket
import struct

import zmq

from moe_edge.cluster.transport.base import HUNG_S
from moe_edge.cluster.transport.keys import derive_keys
from moe_edge.core.checks import ConfigError

ZAP_DOMAIN = b"moe_edge"
HEARTBEAT_MS = 500
HANDSHAKE_MS = 5000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 400
LINGER_MS = 500  # for last answers and posts
MAX_FRAME_BYTES = 1 << 30
SLICE_MS = 20  # how often who waits for a peer looks whether it is lost

# Who sends: a letter for the use, the peer's number, random bytes: a connection
# made anew is another, as ZeroMQ drops a second one of the same name.
IDENTITY = struct.Struct("<cI8s")


class Sockets:
    """Makes the sockets of one process.

    Attributes:
      context: ZeroMQ's, with one thread for all of them.
      keys: of the secret.

    Args:
      hung_s: how long a peer may be silent.
    """

    def __init__(self, peer: int, secret: bytes, hung_s: float = HUNG_S):
        self.keys = derive_keys(secret)
        self._peer, self._hung_ms = peer, round(hung_s * 1000)
        self.context = zmq.Context()

    def router(self, host: str, port: int) -> tuple[zmq.Socket, int]:
        """A socket that answers others, and its port.

        Args:
          host: a numeric address of this machine.
          port: 0 takes a free one.
        Raises:
          ConfigError: it cannot be bound.
        """
        router = self._socket(zmq.ROUTER, LINGER_MS)
        router.curve_server = True
        router.curve_publickey = self.keys.server.public
        router.curve_secretkey = self.keys.server.secret
        router.zap_domain = ZAP_DOMAIN
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            router.close()
            raise cannot_listen(host, port, error) from None
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0")
        return router, int(endpoint.rpartition(b":")[2])

    def dealer(self, use: bytes, linger_ms: int = 0) -> zmq.Socket:
        """A socket that asks another process, not yet connected.

        Args:
          use: one letter, part of its identity.
        """
        dealer = self._socket(zmq.DEALER, linger_ms)
        dealer.curve_serverkey = self.keys.server.public
        dealer.curve_publickey = self.keys.client.public
        dealer.curve_secretkey = self.keys.client.secret
        dealer.routing_id = IDENTITY.pack(use, self._peer, os.urandom(8))
        dealer.rcvtimeo = SLICE_MS
        dealer.reconnect_ivl = RECONNECT_MS
        dealer.reconnect_ivl_max = MAX_RECONNECT_MS
        return dealer

    def _socket(self, kind: int, linger_ms: int) -> zmq.Socket:
        made = self.context.socket(kind)
        made.linger = linger_ms
        made.hwm = 0  # a peer that takes nothing is lost after `hung_s`
        made.maxmsgsize = MAX_FRAME_BYTES
        made.heartbeat_ivl = min(HEARTBEAT_MS, self._hung_ms // 4)
        made.heartbeat_timeout = self._hung_ms
        made.heartbeat_ttl = self._hung_ms
        made.handshake_ivl = HANDSHAKE_MS
        return made


def cannot_listen(host: str, port: int, error: OSError | zmq.ZMQError) -> ConfigError:
    """Why an address cannot be bound."""
    what = {
        errno.EADDRINUSE: "it is in use; give another port, or 0",
        errno.EADDRNOTAVAIL: "this machine has no such address",
    }.get(error.errno, error.strerror)
    return ConfigError(f"cannot listen at {host}:{port}: {what}")


def numeric_host(host: str) -> str:
    """The address of a host's name.

    Raises:
      ConfigError: it has none, or it stands for all addresses of a machine.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"host {host!r} has no address: {error.strerror}") from None
    if address == "0.0.0.0":
        raise ConfigError(
            f"host {host!r} stands for every address; give the one that others reach"
        )
    return address
