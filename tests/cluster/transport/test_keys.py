import re

import pytest

from moe_edge.cluster.transport.keys import (
    MIN_SECRET_BYTES,
    derive_keys,
    new_secret,
    read_secret,
)
from moe_edge.core.checks import ConfigError


def secret_file(folder, content: bytes, mode: int = 0o600):
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_read_secret_takes_off_white_space(tmp_path):
    path = secret_file(tmp_path, b"sixteen bytes ok\n")
    assert read_secret(path) == b"sixteen bytes ok"


def test_read_secret_missing_is_refused(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: No such file"):
        read_secret(path)


@pytest.mark.parametrize("content", [b"", b"fifteen bytes..", b"x" + b" " * 20])
def test_read_secret_short_is_refused(tmp_path, content):
    path = secret_file(tmp_path, content)
    size = len(content.strip())
    with pytest.raises(ConfigError, match=f"holds {size} bytes, expected at least 16"):
        read_secret(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_read_secret_open_to_others_is_refused(tmp_path, mode):
    path = secret_file(tmp_path, b"x" * 32, mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:o}, open to others"):
        read_secret(path)


def test_keys_follow_from_the_secret_alone():
    one, again, other = (derive_keys(s * 16) for s in (b"a", b"a", b"b"))
    assert one == again
    pairs = [pair for keys in (one, other) for pair in (keys.server, keys.client)]
    assert len({pair.public for pair in pairs}) == 4
    assert len({pair.secret for pair in pairs}) == 4
    assert repr(one.server.secret)[2:-1] not in repr(one)


def test_keys_of_a_short_secret_are_refused():
    with pytest.raises(ConfigError, match="the secret holds 3 bytes"):
        derive_keys(b"abc")


def test_new_secrets_differ():
    assert new_secret() != new_secret()
    assert len(new_secret()) >= MIN_SECRET_BYTES
