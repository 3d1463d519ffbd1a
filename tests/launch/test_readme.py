"""README: short cells, numbers that our arithmetic gives, commands that run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from moe_edge.commands.gin_files import find

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST_CELL = 120  # characters; the table of entries in results/ may have longer ones


@pytest.fixture(scope="module")
def numbers():
    """docs/readme_numbers.py, which is no part of a package."""
    path = ROOT / "docs" / "readme_numbers.py"
    spec = importlib.util.spec_from_file_location("readme_numbers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def long_cells(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split(" | ")]
    return [cell for cell in cells if len(cell) > LONGEST_CELL]


def test_cells_are_one_line():
    assert long_cells(README) == []
    assert long_cells(f"| short | {'long ' * 25}|") != []


def test_table_of_gpus_is_what_our_arithmetic_gives(numbers):
    table = "\n".join(numbers.table())
    assert f"\n\n{table}\n\n" in README
    assert "| all |" in table and "| too little |" in table


def test_share_of_experts_by_hand(numbers):
    """Of a GiB: what is left after the rest, divided by an expert's bytes."""
    fit = numbers.fit("olmoe_1b_7b")
    expert = 3 * 2048 * 1024 * 2
    assert fit.expert_bytes == expert and fit.needs.staging == 5 * expert
    assert fit.needs.cache == 16 * 2 * 4096 * 2048 * 4  # keys and values in float32
    budget = fit.needs.other_bytes + 512 * expert
    assert fit.share(budget) == 0.5 and fit.share(budget - 1) == 511 / 1024
    assert fit.share(fit.needs.other_bytes + expert) == 0  # the least is two slots
    assert fit.share(10**12) == 1


def test_figure_is_drawn_from_the_entries(numbers, tmp_path):
    numbers.draw(tmp_path / "readme.png")
    drawn = (tmp_path / "readme.png").read_bytes()
    assert drawn[:4] == b"\x89PNG" and len(drawn) > 20_000


def commands(text: str) -> list[list[str]]:
    """The `moe-edge` commands of code blocks, as words; `\\` continues a line."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [block for kind, block in found if not kind]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[1:] for each in words if each and each[0] == "moe-edge"]


@pytest.mark.parametrize("command", commands(README), ids=" ".join)
def test_command_is_accepted(command, run_script, tmp_path):
    """With --dry_run, on the default model where README has a reader's own."""
    name, *flags = command
    if name == "refactor":
        pytest.skip("needs the profile that the command before it writes")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "0", "prompt": "Hello"}\n', encoding="utf-8")
    names = {"HF_FOLDER": "default", "OURS": "ours", "FILE": str(prompts)}
    if "OURS" in flags and name != "convert":
        run_script("convert", "--src", "default", "--dst", "ours")
    flags = [names.get(flag, flag) for flag in flags]
    flags = [str(ROOT / flag) if flag == "README.md" else flag for flag in flags]
    done = run_script(name, *flags, "--dry_run")
    assert done.code == 0 and done.summary["dry_run"], done.err


def test_commands_are_found():
    text = "```\nmoe-edge a --b \\\n  --c   # no\npip x\n```\n`moe-edge d`"
    assert commands(text) == [["a", "--b", "--c"]]
    assert len(commands(README)) > 12
    assert Path(find("smoe")).is_file()
