"""Pictures are drawn without touching what the caller draws by."""

import matplotlib
import pytest

from moe_edge.core.figures import STYLE, picture


@pytest.fixture
def backend():
    """A caller's own, as a notebook's is; what was there before comes back."""
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    yield "svg"
    matplotlib.use(before)


def test_picture_leaves_the_callers_backend_and_style(backend, tmp_path):
    size = matplotlib.rcParams["font.size"]
    with picture(tmp_path / "x.png", "Title", figsize=(2, 1)) as (figure, axes):
        axes.plot([0, 1])
        assert figure.get_size_inches().tolist() == [2, 1]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert matplotlib.get_backend() == backend
    assert matplotlib.rcParams["font.size"] == size != STYLE["font.size"]


def test_picture_has_as_many_axes_as_asked_for(tmp_path):
    with picture(tmp_path / "x.png", nrows=1, ncols=3, sharey=True) as (_, axes):
        assert axes.shape == (3,)
