"""Which files a missed expert's decode layer passes through: the walk of a reader.

One layer of one step of decoding, from reading what its router chose to dispatching
`advance`, followed by `sys.setprofile`. Printed are the files in the order in which
they are entered, and how often each is: called from another file.

    python tools/walk.py [PREDICTOR]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_edge
import moe_edge as me

ROOT = Path(moe_edge.__file__).parent
FIRST = ("engine/routing_reader.py", "read")
# Called for a layer that decodes, and for an expert that is missed.
DECODES = {"ready_slots", "admit"}


class Walk:
    """The last whole walk: (file, function) of every call from another file."""

    def __init__(self):
        self.calls: list[tuple[str, str]] = []
        self._open: list[tuple[str, str]] | None = None

    def see(self, frame, event: str, arg: Any) -> None:
        """For `sys.setprofile`."""
        if event != "call" or not (here := file_of(frame)):
            return
        call = here, frame.f_code.co_name
        if call == FIRST:
            self._open = [("engine/layered.py", "_moe_layer")]
        if self._open is not None and here != caller_of(frame):
            self._open.append(call)

    def dispatched(self) -> None:
        """`advance` is called."""
        if self._open is not None:
            self.calls, self._open = self._open, None

    @property
    def entered(self) -> dict[str, int]:
        """How often each file is called from another one, in order of the first."""
        counts: dict[str, int] = {}
        for file, _ in self.calls:
            counts[file] = counts.get(file, 0) + 1
        return counts


def file_of(frame) -> str:
    """The file of a frame within the package; empty of any other."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""


def caller_of(frame) -> str:
    """The file of ours that called, perhaps through others' code."""
    while (frame := frame.f_back) is not None:
        if found := file_of(frame):
            return found
    return ""


def walk_of(engine, decode: Callable[[], Any]) -> Walk:
    """Of a layer with a missed expert in a call that decodes.

    Args:
      engine: of mode layered, warmed up.
    """
    walk, found, programs = Walk(), [], engine.programs
    advance = programs.advance

    def advanced(*given, **named):
        walk.dispatched()
        if not found and DECODES <= {name for _, name in walk.calls}:
            found.append(list(walk.calls))
        return advance(*given, **named)

    programs.advance = advanced
    sys.setprofile(walk.see)
    try:
        decode()
    finally:
        sys.setprofile(None)
        programs.advance = advance
    walk.calls = found[0]
    return walk


def main() -> None:
    predictor = sys.argv[1] if len(sys.argv) > 1 else "none"
    given = {"mode": "layered", "predictor": predictor}
    with me.load("default").offload("25%", **given) as engine:
        engine.generate("Once upon a time", 8)
        walk = walk_of(engine.core, lambda: engine.generate("Once upon", 8))
    for file, count in walk.entered.items():
        names = [name for where, name in walk.calls if where == file]
        print(f"{count:3} {file:32} {' '.join(names)}")
    print(len(walk.entered), "files,", len(walk.calls), "calls between files")


if __name__ == "__main__":
    main()
