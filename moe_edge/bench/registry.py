"""All studies by name; a study's module is imported when it is asked for.

Those of papers, and those that need several papers, stand in their tables
(core/tables.py).
"""

import importlib
from collections.abc import Callable
from typing import Any

from moe_edge.bench.study import Study
from moe_edge.core.checks import check_known
from moe_edge.core.tables import load, plugins

# Name -> `module:object`, a Study or several by name.
_OWN = {
    "fidelity_default": "moe_edge.bench.fidelity.study:STUDIES",
    "fidelity_quantised": "moe_edge.bench.fidelity.study:STUDIES",
    "quickstart": "moe_edge.bench.quickstart.study:STUDY",
}
STUDIES = dict(sorted((plugins("study") | _OWN).items()))


def find(name: str) -> Study:
    """The study of that name.

    Raises:
      ConfigError: an unknown name; the message lists the known ones.
    """
    check_known("study", name, STUDIES)
    found = load(STUDIES[name])
    return found if isinstance(found, Study) else found[name]


def later(path: str) -> Callable[..., Any]:
    """The function `module.name` of this package; called, it imports its module.

    What measures loads JAX. Settings, which do not, are refused before that.
    """
    module, _, name = path.rpartition(".")

    def call(*args):
        measuring = importlib.import_module(f"moe_edge.{module}")
        return getattr(measuring, name)(*args)

    return call
