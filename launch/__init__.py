"""Scripts. Importing this package drops their own folder from `sys.path`.

`python launch/evaluate.py` puts launch/ first there, where evaluate.py would hide
any other package of that name.
"""

import sys
from pathlib import Path

_FOLDERS = {Path(__file__).resolve().parent}
_main_file = getattr(sys.modules.get("__main__"), "__file__", None)
if _main_file and Path(_main_file).resolve().parent.name == "launch":
    _FOLDERS.add(Path(_main_file).resolve().parent)
sys.path[:] = [
    entry for entry in sys.path if Path(entry or ".").resolve() not in _FOLDERS
]
