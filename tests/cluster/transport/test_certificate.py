"""Who has the secret is let in, and nobody else."""

import socket
import ssl
import threading

import pytest

from moe_edge.cluster.transport.keys import tls_context


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
