"""Which files a remote call passes through whose server is lost: until tokens go on.

Three servers of a tiny model and their scheduler live in this process, over real
sockets, each in threads; one is killed in the midst of a run. Every thread of the
others is followed by `threading.setprofile` from the kill to the first token after all
that are left have confirmed the next table. Printed are the files of `cluster/` in the
order in which they are entered, and which of their functions other files call.

    python tools/call_walk.py
"""

import sys
import threading

from tests.support.live_cluster import SLOTS, LiveCluster, random_held, requests
from tools.request_walk import RequestWalk

LENGTHS, NEW = (9, 16, 12, 5), 24
LOST, KILLED_AT = 1, 8  # server; at this token of all
# Where a reader does not follow: the form of messages, the engine above its calls, and
# who only notes them.
BESIDE = ("cluster/transport/wire.py", "cluster/transport/wire_control.py")
BESIDE += ("cluster/node/engine.py", "cluster/node/ledger.py")


class CallWalk(RequestWalk):
    """But for threads of the lost, and others while they end it."""

    def __init__(self):
        super().__init__()
        self.unseen: set[threading.Thread] = set()

    def see(self, frame, event: str, arg: object) -> None:
        if threading.current_thread() not in self.unseen:
            super().see(frame, event, arg)

    @property
    def way(self) -> list[str]:
        files = (file for file in self.entered if file.startswith("cluster/"))
        return [file for file in files if file not in BESIDE]


class _Until:
    """What the scheduler says and hears: opens and closes the walk."""

    def __init__(self, walk: CallWalk, cluster: LiveCluster):
        self._walk, self._cluster, self._open = walk, cluster, walk.open()
        self._tokens, self._confirmed, self._ended = 0, set(), False

    def _kill(self) -> None:
        one, me = self._cluster.servers[LOST], threading.current_thread()
        its = one.transport
        self._walk.unseen |= {one._thread, its._watch, *its._answering, me}
        self._cluster.kill(LOST)
        self._walk.unseen.discard(me)

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


def call_walk() -> CallWalk:
    """Of one loss."""
    walk = CallWalk()
    threading.setprofile(walk.see)
    try:
        with LiveCluster([SLOTS] * 3) as cluster:
            cluster.scheduler.react = _Until(walk, cluster)
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
    for file in walk.way:
        print(f"{file:43} {' '.join(walk.entered[file])}")
    print(len(walk.way), "files of cluster/, of", len(walk.entered), "in all")


if __name__ == "__main__":
    main()
