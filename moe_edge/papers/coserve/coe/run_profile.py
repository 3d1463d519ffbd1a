"""The root of `moe-edge profile_coe`: what a graph's experts cost on this machine."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.papers.coserve.coe.case import CoeWork
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts, override
from moe_edge.papers.coserve.workload.coe_graph import read_graph

ANY = ArchitectureCosts(1.0, 0.0, 1, 0, 1, {"disk": 0.0, "host": 0.0})


@root
def run_profile_coe(
    run: RunFolder,
    *,
    graph: str,
    kinds: str = "",
    most_batch: int = 32,
    repeats: int = 9,
    margin: float = 0.05,
    set: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures every architecture of a graph on every kind of device.

    Args:
      run: folder of `coe_profile.json`, which moe-edge coserve reads.
      graph: a `coe.json`, with the files of its experts; or `demo`, the board that
        comes with this program.
      kinds: of executors, separated by commas, such as gpu,cpu; cpu is the processor,
        any other kind the accelerator or, where there is none, the processor too.
        Empty: what there is.
      most_batch: largest batch that is tried; sizes are powers of two.
      repeats: rounds behind each median.
      margin: by so much less an image has to take in a larger batch for that to pay.
      set: numbers to store in place of what is measured, as
        KIND.ARCHITECTURE.FIELD=NUMBER, such as *.*.disk_s=0.1.
    Raises:
      MoeEdgeError: bad input.
    """
    path = CoeWork(graph=graph).graph_path
    read = read_graph(path)
    run.check_apart(path)
    names = sorted({expert.architecture for expert in read.experts})
    import jax  # only now: a refused value should not wait for it

    from moe_edge.papers.coserve.coe.profiler import (
        ProfileSizes,
        device_of,
        profile_all,
    )
    from moe_edge.papers.coserve.coe.store import ExpertStore

    sizes = ProfileSizes(most_batch=most_batch, repeats=repeats, margin=margin)
    devices = {kind: device_of(kind) for kind in _kinds(kinds)}
    override({kind: dict.fromkeys(names, ANY) for kind in devices}, set)
    store = ExpertStore(read, path.parent)
    store.check()
    if run.dry_run:
        return {"devices": {kind: names for kind in devices}}
    found = profile_all(read, store, devices, sizes)
    costs = {
        kind: {name: one.costs for name, one in each.items()}
        for kind, each in found.items()
    }
    costs = {
        kind: {name: dataclasses.asdict(one) for name, one in each.items()}
        for kind, each in override(costs, set).items()
    }
    machine = {
        "jax": jax.__version__,
        "devices": {kind: device.device_kind for kind, device in devices.items()},
    }
    told = {
        kind: {name: one.to_json() for name, one in each.items()}
        for kind, each in found.items()
    }
    stored = {"machine": machine, "devices": costs, "measured": told, "set": list(set)}
    run.write(lambda folder: write_json(folder / "coe_profile.json", stored))
    for kind, each in costs.items():
        for name, one in each.items():
            print(f"{kind}, {name}: {_sentence(one)}")
    return {"devices": costs}


def _kinds(text: str) -> list[str]:
    """Names of kinds, each once."""
    import jax

    if not text:
        return ["cpu"] if jax.default_backend() == "cpu" else ["gpu", "cpu"]
    found = [part.strip() for part in text.split(",")]
    if not all(part.isidentifier() for part in found) or len({*found}) < len(found):
        raise ConfigError(f"kinds is {text!r}, expected names such as gpu,cpu")
    return found


def _sentence(costs: dict[str, Any]) -> str:
    """Costs for people."""
    k_ms, b_ms = 1e3 * costs["k_s"], 1e3 * costs["b_s"]
    disk_ms, host_ms = (1e3 * costs["load_s"][tier] for tier in ("disk", "host"))
    return (
        f"n images take {k_ms:.3g} n + {b_ms:.3g} ms (r2 {costs['r2']:.3f}), at most "
        f"{costs['max_batch']} pay, {costs['item_bytes']} bytes each; a load takes "
        f"{disk_ms:.3g} ms from disk, {host_ms:.3g} from memory"
    )
