"""The secret that the processes of a cluster share, and the keys made from it.

Both key pairs of CURVE follow from the secret: whoever knows it knows the server's
public key, and a server accepts the one client key only. For TLS the secret is turned
into an Ed25519 key and a certificate of it, always the same one. All processes have it,
and accept no other: who has not the secret has not the key. Python's `ssl` cannot make
certificates, nor take a shared key before Python 3.13.
"""

import dataclasses
import datetime
import functools
import hashlib
import secrets
import ssl
import stat
import tempfile
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
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


@functools.lru_cache(maxsize=8)
def tls_context(secret: bytes, server: bool) -> ssl.SSLContext:
    """TLS 1.3 whose both ends must know the secret."""
    seed = hashlib.sha256(b"moe_edge cluster blocks 1\0" + secret).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    certificate = _certificate(key)
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    )
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.num_tickets = 0  # nothing is resumed
    context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    with tempfile.NamedTemporaryFile() as file:  # `ssl` reads files only; mode 600
        file.write(certificate.public_bytes(Encoding.PEM))
        kind = PrivateFormat.PKCS8, NoEncryption()
        file.write(key.private_bytes(Encoding.PEM, *kind))
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    """Of the key and signed with it, valid for ever; nothing in it is drawn."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "moe_edge")])
    made = x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
    made = made.not_valid_before(datetime.datetime(1970, 1, 1))
    made = made.not_valid_after(datetime.datetime(9999, 12, 31))
    return made.sign(key, None)
