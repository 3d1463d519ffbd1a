"""Flags and help come from a root's signature and docstring; JAX comes later."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from moe_edge.commands.root_flags import flag_kind, parameter_texts
from tests.launch.conftest import ROOT

LIGHT = [
    *("convert_checkpoint", "evaluate", "generate", "load", "lm_eval"),
    *("model_card", "pretrain", "profile_machine", "profile_model", "prune", "replay"),
    *("place_experts", "refactor_model", "simulate"),
]


def test_flag_kind_follows_the_annotation():
    kinds = {
        str: flags.DEFINE_string,
        str | int: flags.DEFINE_string,
        int | None: flags.DEFINE_integer,
        bool: flags.DEFINE_bool,
        float | Sequence[float] | None: flags.DEFINE_float,
        Sequence[str]: flags.DEFINE_multi_string,
        Mapping[str, int] | None: None,  # gin only
    }
    assert {kind: flag_kind(kind) for kind in kinds} == kinds


def test_flag_of_another_kind_is_refused_in_words(run_script):
    error = run_script("generate", "--prompt=a", "--max_new_tokens=1.5").error
    assert "--max_new_tokens=1.5: expected a whole number (--help lists" in error
    error = run_script("generate", "--prompt=a", "--temperature=hot").error
    assert "--temperature=hot: expected a number (--help lists" in error
    error = run_script("generate", "--prompt=a", "--overwrite=maybe").error
    assert "--overwrite=maybe: expected true or false (--help lists" in error


def test_parameter_texts_reads_the_args_section():
    def root():
        """Does something.

        Args:
          rows, columns: how many: two
            lines.
          name: of it.
        Returns:
          nothing: at all.
        """

    text = "how many: two lines."
    assert parameter_texts(root) == {"rows": text, "columns": text, "name": "of it."}
    assert parameter_texts(lambda: None) == {}


def test_roots_load_without_jax():
    code = "import sys; from moe_edge.configurables import register;"
    code += f"[register(name) for name in {LIGHT}];"
    code += (
        "print({'jax', 'scipy.stats', 'matplotlib'} & sys.modules.keys() or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "light\n", done


def test_script_without_a_required_value_names_its_flags(run_script):
    error = "error: no value for --data_dir, --out: give it as a flag or in gin"
    assert run_script("fit_routing").error == error
    done = run_script("fit_routing", "--out", "x", "--out_dir", "y")
    assert done.error == "error: --out_dir means nothing to fit_routing"
