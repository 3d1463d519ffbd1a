from tests.bench.conftest import programs

__all__ = ["programs"]  # a fixture
