"""Which files a request over HTTP passes through: from its bytes to its last token.

A short completion, greedy, of one row, streamed by a server in this process over a tiny
model: every thread is followed by `threading.setprofile`. Printed are the files in the
order in which they are entered, and which of their functions other files call.

    python tools/request_walk.py
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.live_server import completion, live_server
from tools.walk import caller_of, file_of

# Where a reader does not follow: what any file may call, the engine beneath the row
# slots, and whoever is only told.
ROOMS = ("core/", "model/", "kernels/", "convert/", "hardware/")
ENGINE, SLOTS = "engine/", ("engine/slot", "engine/prompt")
PROGRAMS = "engine/slot_programs.py"
TOLD = ("serve/observers.py", "serve/metrics.py", "serve/experts.py")


class RequestWalk:
    """File -> functions of it that other files called, both in order."""

    def __init__(self):
        self.entered: dict[str, list[str]] = {}
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is called meanwhile, by any thread, is part of the walk."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def see(self, frame, event: str, arg: object) -> None:
        """For `threading.setprofile`."""
        if not self._is_open or event != "call" or not (file := file_of(frame)):
            return
        if file != caller_of(frame):
            names = self.entered.setdefault(file, [])
            if frame.f_code.co_name not in names:
                names.append(frame.f_code.co_name)

    @property
    def way(self) -> list[str]:
        """The files that a reader follows."""
        return [file for file in self.entered if _is_followed(file)]


def _is_followed(file: str) -> bool:
    if file.startswith(ENGINE):
        return file.startswith(SLOTS) and file != PROGRAMS
    return not file.startswith(ROOMS) and file not in TOLD


def request_walk() -> RequestWalk:
    """Of the second of two like requests: nothing is made for the first time."""
    walk = RequestWalk()
    threading.setprofile(walk.see)
    try:
        with live_server() as server:
            server.post("/v1/completions", completion(stream=True))
            with walk.open():
                server.post("/v1/completions", completion(stream=True, max_tokens=3))
    finally:
        threading.setprofile(None)
    return walk


def main() -> None:
    walk = request_walk()
    for file in walk.way:
        print(f"{file:32} {' '.join(walk.entered[file])}")
    print(len(walk.way), "files, of", len(walk.entered), "that anything was called in")


if __name__ == "__main__":
    main()
