"""The key of a server: what requests bring, read from a file or the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

from moe_edge.core.checks import ConfigError

KEY_VARIABLE = "MOE_EDGE_API_KEY"


def read_key(
    file: str | None, environment: Mapping[str, str] = os.environ
) -> bytes | None:
    """The key that requests must bring; None: none was set.

    Raises:
      ConfigError: two keys, or one that no header could carry.
    """
    given = environment.get(KEY_VARIABLE)
    if file is not None and given is not None:
        raise ConfigError(
            f"a key from --api_key_file and one from {KEY_VARIABLE}; give one of them"
        )
    if file is None and given is None:
        return None
    where = KEY_VARIABLE if file is None else f"--api_key_file {file}"
    key = given if file is None else Path(file).read_text("utf-8", "replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where} holds no key: expected printable ASCII without spaces"
        )
    return key.encode()
