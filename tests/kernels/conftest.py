import jax
import pytest

from moe_edge.kernels import native
from tests.support.host_kernels import host_device

# Interpreted where there is none.
OF_A_GPU = ("test_grouped", "test_lookup", "test_rows")


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """Native also in a run of all tests with MOE_EDGE_KERNELS=xla."""
    monkeypatch.setattr(native, "choice", lambda: "native")
    yield
    if native.library() is not None:
        native.resize(0)
        native.use(None)


@pytest.fixture(autouse=True)
def arrays_on_the_host(request):
    """Where there is a GPU, too, the host kernels' tests are about the CPU.

    Arrays and programs are the CPU's in all threads, and it is the default backend.
    """
    if request.module.__name__.rpartition(".")[2] in OF_A_GPU:
        yield
        return
    default = jax.config.jax_default_device
    jax.config.update("jax_default_device", host_device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "cpu")
        yield
    jax.config.update("jax_default_device", default)
