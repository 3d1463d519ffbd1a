import pytest


@pytest.fixture(autouse=True, scope="session")
def short_pools():
    """Laws hold for short texts too, which are drawn ten times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_edge.simulate.cluster.build.POOL_TOKENS", 400)
        yield
