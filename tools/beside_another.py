"""Decode speed next to a process that keeps one core busy, against a quiet machine.

    python tools/beside_another.py FOLDER [--rounds 5] [--peers]

Rounds are in turn: quiet, then beside the busy process, on a core of this one's mask.
Prints tokens/s and processor time of each and the ratio of the medians. With --peers
llama.cpp runs the same weights in the same rounds, if it is installed.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from moe_edge.engine.load import load_engine
from moe_edge.studies.speed import peers
from moe_edge.studies.speed.decode import PROMPT_TOKENS, decode_rate
from moe_edge.studies.speed.runs import random_prompts

STEPS = 96
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextlib.contextmanager
def busy(core: int | None):
    """A process that never rests on a core; None: no process."""
    if core is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) as process:
        try:
            time.sleep(0.3)
            yield
        finally:
            process.kill()


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("folder", type=Path)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--peers", action="store_true")
    given = flags.parse_args()
    engine = load_engine(given.folder, with_tokenizer=False).engine
    prompts = random_prompts(engine, 1, PROMPT_TOKENS)
    ways = {"ours": functools.partial(decode_rate, engine, prompts, STEPS)}
    for peer in peers.load_peers(given.folder) if given.peers else []:
        for way in peer.ways:
            rate = functools.partial(peer.rate, way, prompts, STEPS)
            ways[f"{peer.name} {way}"] = rate
    core = max(os.sched_getaffinity(0))
    for name, rate in ways.items():
        rate()
        found = {None: [], core: []}
        for _ in range(given.rounds):
            for where, speeds in found.items():
                with busy(where):
                    begun_s = time.process_time()
                    speed = rate()
                    own_ms = 1e3 * (time.process_time() - begun_s) / STEPS
                speeds.append((speed, own_ms))
        medians = {}
        for where, speeds in found.items():
            medians[where] = statistics.median(speed for speed, _ in speeds)
            told = ", ".join(f"{speed:.0f} ({ms:.2f} ms)" for speed, ms in speeds)
            how = "quiet" if where is None else f"core {where} busy"
            print(f"{name}, {how}: {told}")
        print(f"{name}: {medians[core] / medians[None]:.2f} of its quiet speed")


if __name__ == "__main__":
    main()
