"""Scripts. Importing this package drops their own folder from `sys.path`.

`python launch/evaluate.py` puts launch/ first there, where evaluate.py would hide
any other package of that name. A script that is interrupted while it imports ends in
one line, as later.
"""

import os
import signal
import sys
from pathlib import Path

_FOLDERS = {Path(__file__).resolve().parent}


def end_at_once(number, frame) -> None:
    """Handler of Ctrl-C until there is something to tidy up (`common.guarded`)."""
    os.write(2, b"interrupted\n")
    os._exit(130)


_main_file = getattr(sys.modules.get("__main__"), "__file__", None)
if _main_file and Path(_main_file).resolve().parent.name == "launch":
    _FOLDERS.add(Path(_main_file).resolve().parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
sys.path[:] = [
    entry for entry in sys.path if Path(entry or ".").resolve() not in _FOLDERS
]
