"""A TLS identity made from the secret that the processes of a cluster share.

The secret is turned into an Ed25519 key (RFC 8032) and a certificate of it. All
processes have the same, and accept no other: who has not the secret has not the key.
Python's `ssl` cannot make certificates, nor take a shared key before Python 3.13.
"""

import functools
import hashlib
import ssl
import tempfile
from base64 import encodebytes

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Y = 4 * pow(5, -1, _P) % _P
_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE = _X, _Y, 1, _X * _Y % _P

_INTEGER, _BITS, _TEXT, _UTC, _TIME, _SEQUENCE, _SET = 2, 3, 12, 23, 24, 48, 49
_ED25519 = bytes.fromhex("06032b6570")  # 1.3.101.112
_COMMON_NAME = bytes.fromhex("0603550403")
_KEY_START = bytes.fromhex("302e020100300506032b657004220420")  # PKCS 8, then the seed


@functools.lru_cache(maxsize=8)
def tls_context(secret: bytes, server: bool) -> ssl.SSLContext:
    """TLS 1.3 whose both ends must know the secret."""
    seed = hashlib.sha256(b"moe_edge cluster blocks 1\0" + secret).digest()
    certificate = _certificate(seed)
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    )
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.num_tickets = 0  # nothing is resumed
    context.load_verify_locations(cadata=certificate)
    with tempfile.NamedTemporaryFile() as file:  # `ssl` reads files only; mode 600
        file.write(_pem("CERTIFICATE", certificate))
        file.write(_pem("PRIVATE KEY", _KEY_START + seed))
        file.flush()
        context.load_cert_chain(file.name)
    return context


def sign(seed: bytes, message: bytes | None = None) -> tuple[bytes, bytes]:
    """The public key of a seed and the signature of a message; RFC 8032, 5.1."""
    head = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(head[:32], "little") & (2**254 - 8) | 2**254
    public = _times(scalar)
    if message is None:
        return public, b""
    nonce = _digest(head[32:], message)
    point = _times(nonce)
    answer = (nonce + _digest(point, public, message) * scalar) % _ORDER
    return public, point + answer.to_bytes(32, "little")


def _certificate(seed: bytes) -> bytes:
    """X.509, version 1, valid for ever, of the key and signed with it."""
    kind = _der(_SEQUENCE, _ED25519)
    entry = _der(_SEQUENCE, _COMMON_NAME, _der(_TEXT, b"moe_edge"))
    name = _der(_SEQUENCE, _der(_SET, entry))
    from_to = _der(_UTC, b"700101000000Z"), _der(_TIME, b"99991231235959Z")
    key = _der(_SEQUENCE, kind, _der(_BITS, b"\0", sign(seed)[0]))
    parts = _der(_INTEGER, b"\1"), kind, name, _der(_SEQUENCE, *from_to), name, key
    body = _der(_SEQUENCE, *parts)
    return _der(_SEQUENCE, body, kind, _der(_BITS, b"\0", sign(seed, body)[1]))


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)  # of less than 256 bytes
    return bytes([tag, *([0x81] if len(body) > 127 else []), len(body)]) + body


def _pem(name: str, data: bytes) -> bytes:
    lines = f"-----BEGIN {name}-----\n", encodebytes(data).decode()
    return "".join((*lines, f"-----END {name}-----\n")).encode()


def _digest(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _times(scalar: int) -> bytes:
    """A multiple of the base point, as 32 bytes."""
    total, power = (0, 1, 1, 0), _BASE
    while scalar:
        if scalar & 1:
            total = _add(total, power)
        power = _add(power, power)
        scalar >>= 1
    x, y, z, _ = total
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


def _add(one: tuple, other: tuple) -> tuple[int, int, int, int]:
    """Sum of two points (X, Y, Z, XY/Z)."""
    (x, y, z, t), (u, v, w, s) = one, other
    a, b = (y - x) * (v - u) % _P, (y + x) * (v + u) % _P
    c, d = 2 * _D * t * s % _P, 2 * z * w % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P
