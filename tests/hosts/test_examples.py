"""The scripts of examples/hosts start commands that take their flags."""

import inspect
import re
from pathlib import Path

from absl import flags

import moe_edge.commands.common  # noqa: F401  defines the flags of every command
from moe_edge.configurables import get_root

FOLDER = Path(__file__).parents[2] / "examples/hosts"


def test_commands_of_examples_take_their_flags():
    found = 0
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        calls = re.findall(r"moe-edge (\w+) (--[^\n]*)", text)
        settings = re.findall(r"^#   FLAGS=(.*)", text, re.MULTILINE)
        for name, given in [*calls, *(("serve", given) for given in settings)]:
            known = {*inspect.signature(get_root(name)).parameters, *flags.FLAGS}
            names = re.findall(r"--(\w+)", given)
            assert names and not {*names} - known, f"{path.name}: {given}"
            found += len(names)
    assert found > 15
