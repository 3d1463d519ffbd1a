"""The secret that the processes of a cluster share, and the CURVE keys made from it.

Both key pairs follow from the secret: whoever knows it knows the server's public key,
and a server accepts the one client key only.
"""

import dataclasses
import hashlib
import secrets
import stat
from pathlib import Path

import zmq
from zmq.utils import z85

from moe_edge.core.checks import ConfigError

MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Keys:
    """What a process listens with and what it connects with."""

    server: KeyPair
    client: KeyPair


def new_secret() -> bytes:
    """A fresh secret, printable, for the processes of one run on one machine."""
    return secrets.token_hex(32).encode()


def read_secret(path: str | Path) -> bytes:
    """The secret in a file, without white space around it.

    Raises:
      ConfigError: no such file, others than its owner may read it, or it is short.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"secret file {path} is a folder; name a file in it")
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"secret file {path} has mode {stat.S_IMODE(mode):o}, open to others; "
                f"expected 600: chmod 600 {path}"
            )
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the secret file {path}: {error.strerror}; write at least "
            f"{MIN_SECRET_BYTES} random bytes into it"
        ) from None
    _check_length(f"secret file {path}", secret)
    return secret


def derive_keys(secret: bytes) -> Keys:
    """The keys of all processes that know this secret.

    Raises:
      ConfigError: it is too short.
    """
    _check_length("the secret", secret)
    return Keys(_pair(b"server", secret), _pair(b"client", secret))


def _check_length(name: str, secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{name} holds {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}"
        )


def _pair(label: bytes, secret: bytes) -> KeyPair:
    digest = hashlib.sha256(b"moe_edge cluster " + label + b" 1\0" + secret).digest()
    key = z85.encode(digest)
    return KeyPair(zmq.curve_public(key), key)
