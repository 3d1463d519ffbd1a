"""The index of entries, and the small pictures in it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moe_edge.metrics.index import (
    SECTIONS,
    WIDTH,
    find_entries,
    index_text,
    thumb_of,
    write_index,
)

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def root(tmp_path):
    """Results with two entries."""
    for name in ("coserve_fig11", "smoe_fig4"):
        shutil.copytree(RESULTS / name, tmp_path / name)
    return tmp_path


def test_every_entry_has_a_small_picture_in_the_section_of_its_paper(root):
    (root / "thumbs").mkdir()
    (root / "thumbs" / "gone.png").write_bytes(b"old")
    write_index(root)
    text = (root / "README.md").read_text()
    assert text == index_text(root)
    assert text.index("## SMoE") < text.index("[smoe_fig4]") < text.index("## CoServe")
    assert "## Prism" not in text  # no entry, no heading
    assert sorted(p.name for p in (root / "thumbs").iterdir()) == [
        "coserve_fig11.png",
        "smoe_fig4.png",
    ]
    with Image.open(root / "thumbs" / "smoe_fig4.png") as small:
        assert small.width == WIDTH
    size = (root / "thumbs" / "smoe_fig4.png").stat().st_size
    assert size < (root / "smoe_fig4" / "plot.png").stat().st_size / 3
    assert '<img src="thumbs/smoe_fig4.png" width="240" alt="smoe_fig4">' in text


def test_a_picture_that_looks_the_same_is_left_and_another_one_replaced(root):
    write_index(root)
    path = root / "thumbs" / "smoe_fig4.png"
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).copy()
    pixels[0, 0] = 0
    Image.fromarray(pixels).save(path)
    almost = path.read_bytes()
    write_index(root)
    assert path.read_bytes() == almost
    Image.fromarray(255 - pixels).save(path)
    write_index(root)
    assert path.stat().st_size < len(almost)


def test_committed_entries_each_have_theirs():
    names = [path.relative_to(RESULTS).as_posix() for path in find_entries(RESULTS)]
    found = {path.name for path in (RESULTS / "thumbs").iterdir()}
    assert found == {thumb_of(name) for name in names}
    text = (RESULTS / "README.md").read_text()
    assert all(f"## {title}\n" in text for title in SECTIONS.values())
