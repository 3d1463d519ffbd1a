from tests.studies.conftest import programs

__all__ = ["programs"]  # a fixture
