import contextlib
import io

import pytest

from moe_edge.commands.main import main
from tests.launch.conftest import (
    Done,
    as_a_new_process,
    run_script,
    run_script_in,
    tiny,
)

__all__ = ["run_script", "run_script_in", "tiny"]  # fixtures


@pytest.fixture
def run_command(tmp_path):
    """Runs `moe-edge ARGS` in this process and an empty folder."""

    def run(*arguments):
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            as_a_new_process(tmp_path, ["/usr/bin/moe-edge", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        return Done(code, out.getvalue(), err.getvalue())

    return run
