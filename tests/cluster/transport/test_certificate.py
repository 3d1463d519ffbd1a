import socket
import ssl
import threading

import pytest

from moe_edge.cluster.transport.certificate import sign, tls_context

# RFC 8032, 7.1: seed, public key, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
]


@pytest.mark.parametrize("seed, public, message, signature", VECTORS)
def test_sign_gives_the_vectors_of_the_standard(seed, public, message, signature):
    found = sign(bytes.fromhex(seed), bytes.fromhex(message))
    assert [part.hex() for part in found] == [public, signature]


def shake(server: bytes, client: bytes):
    """What a handshake of two secrets ends with, at the server and at the client."""
    ends, found = socket.socketpair(), {}

    def run(end, secret, is_server):
        try:
            context = tls_context(secret, is_server)
            with context.wrap_socket(end, server_side=is_server) as stream:
                stream.sendall(b"hello")
                found[is_server] = stream.version(), stream.recv(5)
        except ssl.SSLError as error:
            found[is_server] = type(error)

    thread = threading.Thread(target=run, args=(ends[0], server, True))
    thread.start()
    run(ends[1], client, False)
    thread.join()
    return found[True], found[False]


def test_one_secret_shakes_hands():
    expected = "TLSv1.3", b"hello"
    assert shake(b"a secret of both", b"a secret of both") == (expected, expected)


def test_another_secret_is_refused_by_both():
    server, client = shake(b"a secret of both", b"a secret of one.")
    assert (server, client) == (ssl.SSLError, ssl.SSLCertVerificationError)


def test_a_client_that_proves_nothing_is_refused():
    ends = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def run():
        with context.wrap_socket(ends[1]) as stream, pytest.raises(ssl.SSLError):
            stream.recv(1)

    thread = threading.Thread(target=run)
    thread.start()
    server = tls_context(b"a secret of both", True)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        server.wrap_socket(ends[0], server_side=True)
    thread.join()
