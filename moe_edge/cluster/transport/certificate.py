"""A TLS identity made from the secret that the processes of a cluster share.

The secret is turned into an Ed25519 key and a certificate of it, always the same one.
All processes have it, and accept no other: who has not the secret has not the key.
Python's `ssl` cannot make certificates, nor take a shared key before Python 3.13.
"""

import datetime
import functools
import hashlib
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)


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
