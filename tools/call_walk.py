"""Which files a remote call passes through whose server is lost: until tokens go on.

Three servers of a tiny model and their scheduler live in this process, over real
sockets, each in threads; one is killed in the midst of a run. Every thread is followed
by `threading.setprofile` from the kill to the first token after all that are left have
confirmed the next table. Printed are the files of `cluster/` in the order in which they
are entered, and which of their functions other files call.

    python tools/call_walk.py
"""

import sys
import threading
from collections.abc import Callable
from pathlib import PurePosixPath

from tests.support.live_cluster import SLOTS, LiveCluster, random_held, requests
from tools.request_walk import RequestWalk

LENGTHS, NEW = (9, 16, 12, 5), 24
LOST, KILLED_AT = 1, 8  # server; at this token of all


class _Until:
    """What the scheduler says and hears: opens and closes the walk."""

    def __init__(self, walk: RequestWalk, kill: Callable[[], None]):
        self._kill, self._open = kill, walk.open()
        self._tokens, self._confirmed, self._ended = 0, set(), False

    def __call__(self, way: str, server: int, name: str, fields: dict) -> None:
        if way != "from" or self._ended:
            return
        if name == "token":
            self._tokens += 1
            if self._tokens == KILLED_AT:
                self._open.__enter__()
                self._kill()
            elif len(self._confirmed) == 2:
                self._open.__exit__(None, None, None)
                self._ended = True
        elif name == "confirmed" and self._tokens >= KILLED_AT:
            self._confirmed.add(server)


def call_walk() -> RequestWalk:
    """Of one loss."""
    walk = RequestWalk()
    threading.setprofile(walk.see)
    try:
        with LiveCluster([SLOTS] * 3) as cluster:
            cluster.scheduler.react = _Until(walk, lambda: cluster.kill(LOST))
            sys.setprofile(walk.see)  # the scheduler is in this thread
            run = cluster.run(random_held(3), requests(LENGTHS, NEW, 3))
            sys.setprofile(None)
    finally:
        threading.setprofile(None)
    if not run.failures:
        raise SystemExit("nothing was lost")
    return walk


def main() -> None:
    walk = call_walk()
    way = [file for file in walk.entered if file.startswith("cluster/")]
    for file in way:
        print(f"{file:36} {' '.join(walk.entered[file])}")
    rooms = {str(PurePosixPath(file).parent) for file in way}
    print(len(way), "files in", len(rooms), "rooms of cluster/, of", len(walk.entered))


if __name__ == "__main__":
    main()
