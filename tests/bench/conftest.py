import pytest


@pytest.fixture(autouse=True, scope="module")
def programs(shared_programs):
    """Studies of one model find its programs compiled."""
