"""Settings of the site: `sphinx-build -E -W -c docs . results/local/site`.

The source folder is the repository itself, so that links between docs/, results/,
CHANGELOG.md and CONTRIBUTING.md are links between pages of the site.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # this clone, installed or not

project = "moe_edge"
author = "the authors of moe_edge"
copyright = "the authors of moe_edge, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "results/README.md",
    "results/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "moe_edge/default_model/README.md",
    "moe_edge/papers/**/README.md",
]
exclude_patterns = ["results/local", "**/.*"]

highlight_language = "none"  # of blocks that say no language

html_theme = "furo"
html_title = "moe_edge"
html_copy_source = False
html_show_sourcelink = False

# The small pictures of results/README.md.
myst_enable_extensions = ["html_image"]
# Headings are link targets as on a code host: `use.md#from-python`.
myst_heading_anchors = 4
# Files and folders that are no pages: their names stay text. tests/test_docs.py checks
# that they exist.
nitpick_ignore_regex = [("myst", r".*(configs|examples|launch)(/.*)?")]

# The tutorial is committed without outputs and executed by every build; to build
# without it: -D nb_execution_mode=off.
nb_execution_mode = "auto"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # docstrings say shapes and units
default_role = "literal"
# As text: of "a row a case: ..." a return type would be made.
napoleon_custom_sections = ["Source", "Returns"]


def setup(app):
    from generated import as_written, fill

    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", as_written, priority=400)
