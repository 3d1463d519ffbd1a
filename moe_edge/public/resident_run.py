"""The resident row of `compare`, in a process of its own: JSON in, JSON out.

There no setting or slot of the other rows slows it. On a GPU a process takes most of
the memory when JAX opens it: so `compare` runs this one before it opens the device
itself, where nothing has opened it before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.core.json_reader import parse_json
from moe_edge.engine.inline import has_started
from moe_edge.public.model import Model, load

_CHILD = """import json, sys
sys.path = json.loads(sys.argv[1])
from moe_edge.public.resident_run import main
main()"""
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def run_resident(
    model: Model, rows: Sequence[Sequence[int]], max_new_tokens: int, rounds: int
) -> dict[str, Any]:
    """The resident engine's tokens of each row, and the statistics of each round.

    Not by `multiprocessing`, which would run a caller's script again.

    Raises:
      ConfigError: that process failed; what it printed, and what may help.
    """
    asked: dict[str, Any] = {"checkpoint": model.source, "devices": model.devices}
    asked["activations"] = model.config.activations
    asked["kv_cache"] = model.config.cache_type
    asked["rows"] = [list(map(int, ids)) for ids in rows]
    asked |= {"max_new_tokens": max_new_tokens, "rounds": rounds}
    # Modules come from where this process has them; not from the working directory.
    paths = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    environment, hint = dict(os.environ), ""
    if has_started():
        # What this process holds of a GPU is not there for the other one, which takes
        # what is left as it needs it.
        environment.setdefault(_PREALLOCATE, "false")
        hint = (
            "; on a GPU it has only what this process left: call compare before "
            f"anything else runs a model, or set {_PREALLOCATE}=false before Python "
            "starts"
        )
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, json.dumps(paths)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise ConfigError(
            f"the process of the resident engine ended with exit code "
            f"{done.returncode}; what it printed stands above{hint}"
        )
    return parse_json("answer of the resident engine", done.stdout, ConfigError)


def main() -> None:
    """Reads what is asked from stdin, writes tokens and statistics to stdout."""
    asked = parse_json("stdin", sys.stdin.read(), RequestError)
    names = ("devices", "activations", "kv_cache")
    model = load(asked["checkpoint"], **{name: asked[name] for name in names})
    engine = model.resident(max_batch=1)
    rounds, tokens = [], []
    for turn in range(asked["rounds"] + 1):  # the first compiles
        engine.reset()
        tokens = [
            engine.generate(ids, asked["max_new_tokens"], ignore_eos=True).tokens
            for ids in asked["rows"]
        ]
        if turn:
            rounds.append(engine.stats())
    print(json.dumps({"tokens": tokens, "rounds": rounds}))
