import pytest

from moe_edge.kernels import native


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """Native also in a run of all tests with MOE_EDGE_KERNELS=xla."""
    monkeypatch.setattr(native, "choice", lambda: "native")
    yield
    if native.library() is not None:
        native.resize(0)
        native.use(None)
