"""Who may ask, and with what."""

import socket

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.serve.api_key import read_key
from moe_edge.serve.guards import check_public, is_loopback
from moe_edge.serve.server_options import ServerOptions
from tests.support.live_server import completion, live_server, read_reply

KEY = b"a-key-of-the-tests"


@pytest.fixture(scope="module")
def server():
    with live_server(allowed_host=["my.box"], max_body="20KiB") as running:
        yield running


@pytest.fixture(scope="module")
def guarded():
    with live_server(key=KEY, cors_origin=["https://my.page"]) as running:
        yield running


def bearer(key: bytes) -> dict:
    return {"Authorization": f"Bearer {key.decode()}"}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:80",
        "127.0.0.1",
        "[::1]:9",
        "MY.BOX:1",
        "localhost:",
        "127.8.8.8",
    ],
)
def test_own_hosts_are_answered(server, host):
    assert server.ask("GET", "/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "8.8.8.8",
        "localhost:x",
        "localhost:²",
        "[::1]9",
        "a b",
        "",
        "[::1",
    ],
)
def test_foreign_hosts_are_refused(server, host):
    reply = server.ask("GET", "/health", headers={"Host": host})
    assert (reply.status, reply.code) == (403, "host_not_allowed")
    assert host == "" or host not in reply.json["error"]["message"]


def test_every_answer_has_the_headers_that_browsers_heed(server):
    for reply in (server.get("/health"), server.get("/nowhere"), server.complete()):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert reply.headers["cache-control"] == "no-store"
        assert "server" not in reply.headers


def test_no_page_of_another_origin_may_read_an_answer(server):
    reply = server.get("/v1/models", Origin="https://evil.example")
    assert not [name for name in reply.headers if name.startswith("access-control")]
    ask = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = server.ask("OPTIONS", "/v1/completions", headers=ask)
    assert (preflight.status, preflight.code) == (405, "method_not_allowed")


def test_named_origin_may_and_its_preflight_needs_no_key(guarded):
    origin = {"Origin": "https://my.page"}
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-lang",
    }
    preflight = guarded.ask("OPTIONS", "/v1/completions", headers=origin | asks)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://my.page"
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    asks["Origin"] = "https://evil.example"
    refused = guarded.ask("OPTIONS", "/v1/completions", headers=asks)
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert "Disallowed CORS origin" in refused.json["error"]["message"]
    assert "access-control-allow-origin" not in refused.headers
    reply = guarded.ask("GET", "/v1/models", headers=origin | bearer(KEY))
    assert reply.headers["access-control-allow-origin"] == "https://my.page"
    other = {"Origin": "https://evil.example"} | bearer(KEY)
    reply = guarded.ask("GET", "/v1/models", headers=other)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "given",
    [
        {},
        bearer(b"another"),
        bearer(KEY[:-1]),
        bearer(KEY + b"x"),
        {"Authorization": KEY.decode()},
        {"Authorization": f"Basic {KEY.decode()}"},
        {"Authorization": "Bearer \xe9"},
    ],
)
def test_requests_without_the_key_are_refused(guarded, given):
    for path in ("/v1/models", "/nowhere", "/metrics"):
        reply = guarded.ask("GET", path, headers=given)
        assert (reply.status, reply.code) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


def test_key_opens_and_health_needs_none(guarded):
    reply = guarded.ask("POST", "/v1/completions", completion(), bearer(KEY))
    assert reply.status == 200
    assert guarded.get("/health").status == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json-patch+json",
        "application/json; charset=latin-1",
        "",
    ],
)
def test_body_of_another_kind_is_415(server, kind):
    for path in ("/v1/completions", "/tokenize"):
        reply = server.ask("POST", path, b"{}", {"Content-Type": kind})
        assert (reply.status, reply.code) == (415, "json_required")


def test_json_by_any_of_its_names_is_read(server):
    for kind in ("application/json", "Application/JSON; charset=UTF-8"):
        reply = server.post("/tokenize", {"prompt": "a"}, **{"Content-Type": kind})
        assert reply.status == 200
    packed = {"Content-Encoding": "gzip"}
    assert server.post("/tokenize", {"prompt": "a"}, **packed).code == "json_required"


def test_body_beyond_the_limit_is_413(server):
    reply = server.post("/tokenize", b"x" * 20_481)
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert "20480" in reply.json["error"]["message"]
    assert server.post("/tokenize", b" " * 20_400 + b'{"prompt": "a"}').status == 200


def send_chunks(server, size: int, count: int) -> socket.socket:
    sock = server.connect()
    sock.sendall(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(count):
        sock.sendall(b"%x\r\n%s\r\n" % (size, b" " * size))
    return sock


def test_chunked_body_beyond_the_limit_is_413_too(server):
    sock = send_chunks(server, 10_000, 5)
    sock.sendall(b"0\r\n\r\n")
    assert read_reply(sock).code == "body_too_large"
    endless = send_chunks(server, 20_000, 9)  # beyond what is read of such a body
    assert read_reply(endless).code == "body_too_large"


def test_too_large_body_that_waits_to_be_asked_for_is_not():
    with live_server(max_body="1KiB") as server:
        sock = server.connect()
        sock.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
        )
        assert sock.recv(12) == b"HTTP/1.1 413"


def test_key_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert read_key(str(file), {}) == b"from-a-file"
    assert read_key(None, {"MOE_EDGE_API_KEY": "of-all"}) == b"of-all"
    assert read_key(None, {}) is None
    with pytest.raises(ConfigError, match="MOE_EDGE_API_KEY; give one of them"):
        read_key(str(file), {"MOE_EDGE_API_KEY": "of-all"})
    file.write_text("two words")
    with pytest.raises(ConfigError, match=f"--api_key_file {file} holds no key"):
        read_key(str(file), {})
    with pytest.raises(ConfigError, match="MOE_EDGE_API_KEY holds no key") as error:
        read_key(None, {"MOE_EDGE_API_KEY": "geheim ü"})
    assert "geheim" not in str(error.value)


def test_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("MOE_EDGE_API_KEY", raising=False)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert is_loopback(host)
        check_public(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.local"):
        with pytest.raises(ConfigError, match=f"host {host} is reachable by others"):
            ServerOptions(host=host)
    monkeypatch.setenv("MOE_EDGE_API_KEY", "of-all")
    assert "of-all" not in repr(ServerOptions(host="0.0.0.0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70_000}, "port is 70000, expected 0 to 65535"),
        ({"max_body": "10%"}, "max_body '10%' must be such as 1MiB"),
        ({"max_body": "0B"}, "max_body '0B' must be such as 1MiB"),
        ({"max_body": "many"}, "max_body 'many' must be such as 1MiB"),
        ({"receive_s": 0.0}, "receive_s must be positive, got 0.0"),
        ({"idle_client_s": -1.0}, "idle_client_s must be positive, got -1.0"),
        ({"request_s": float("nan")}, "request_s must be positive, got nan"),
        ({"drain_s": -2.0}, "drain_s must be 0 or more and finite, got -2.0"),
        ({"fail_step": 0}, "fail_step must be a positive whole number, got 0"),
        ({"request_log": "/no/where/log"}, "--request_log /no/where/log: there is no"),
    ],
)
def test_options_that_no_server_could_honour_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)


def test_files_that_are_named_must_be_there():
    with pytest.raises(FileNotFoundError, match="--chat_template /no does not exist"):
        ServerOptions(chat_template="/no")
