"""README: short cells, and numbers that our arithmetic gives."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
