from tests.launch.conftest import programs, run_process, run_script, run_script_in, tiny

__all__ = ["programs", "run_process", "run_script", "run_script_in", "tiny"]  # fixtures
