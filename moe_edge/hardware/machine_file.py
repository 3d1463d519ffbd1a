"""Measured machines as files: what `profile_machine` writes and presets read."""

import json
from pathlib import Path

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import check_there
from moe_edge.hardware.specs import Device, Gpu, Link

FORMAT_VERSION = 1


def read_machine(path: str | Path) -> Gpu:
    """A measured machine, usable wherever a GPU preset is.

    Raises:
      ConfigError: no machine file, or of another version.
      OSError: it cannot be read.
    """
    path = Path(path)
    check_there(
        path, "--cluster or a GPU of it:", "launch/profile_machine.py writes it"
    )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        version = stored["format_version"]
        device, link = stored["device"], stored["host_link"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is no machine file ({error!r}); launch/profile_machine.py writes "
            "them"
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format_version {version}, expected {FORMAT_VERSION}: measure "
            "again with launch/profile_machine.py"
        )
    try:
        return Gpu(device=Device(**device), host_link=Link(**link))
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; measure again") from error
