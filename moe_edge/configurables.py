"""What gin may configure: the root of every script, by the name used in gin files.

Nothing is imported before it is asked for, so a script loads its own root only.
`gin.register` leaves plain Python calls untouched: only `commands/common.py`, which
asks for a root here, sees bindings, and only there are types checked (`checked`). Add a
root to ROOTS and a command to commands/scripts/; a paper names both in its table
(core/tables.py). `offload` is no root: policy files (configs/policies/) set it and hand
it to roots. A study is a root of its own name.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import gin

from moe_edge.core.tables import load, plugins
from moe_edge.core.typed import checked

ROOTS = {
    "cluster": "moe_edge.cluster.run:run_cluster",
    "convert_checkpoint": "moe_edge.convert.convert:convert_checkpoint",
    "evaluate": "moe_edge.evaluate.run:run_evaluate",
    "fit_routing": "moe_edge.workload.routing_fit:fit_routing",
    "generate": "moe_edge.engine.run_generate:run_generate",
    "load": "moe_edge.loadtest.run_load:run_load",
    "lm_eval": "moe_edge.evaluate.run_lm_eval:run_lm_eval",
    "model_card": "moe_edge.training.model_card:run_model_card",
    "place_experts": "moe_edge.place.run_place:run_place",
    "plan": "moe_edge.planner.run_plan:run_plan",
    "pretrain": "moe_edge.training.run:run_pretrain",
    "profile_machine": "moe_edge.profile.run_profile_machine:run_profile_machine",
    "profile_model": "moe_edge.profile.run_profile:run_profile",
    "prune": "moe_edge.profile.run_prune:run_prune",
    "replay": "moe_edge.simulate.replay.run:run_replay",
    "serve": "moe_edge.serve.run_serve:run_serve",
    "simulate": "moe_edge.simulate.cluster.run:run_simulate",
    **plugins("root"),
}
# Users' commands that run a study, under the name that their gin files bind.
COMMANDS = {"fidelity": "fidelity_default", "quickstart": "quickstart"}
OPTIONS = {
    "offload": "moe_edge.engine.offload_options:OffloadOptions",
    "serving": "moe_edge.serve.options:ServingOptions",
}
PLANNED = ("evaluate", "generate", "lm_eval", "load", "serve")  # `device_memory auto`
SHARED = {"serving": ("load", "serve")}  # options whose fields are those roots' own


@functools.cache
def register(name: str) -> None:
    """Registers a root with gin, or what roots take as an option; imports it."""
    place = (ROOTS | OPTIONS).get(name)
    if place is not None:
        found, module = load(place), place.split(".")[1]
        if name in PLANNED:
            found = load("moe_edge.planner.auto_commands:with_auto")(name, found)
    else:
        from moe_edge.bench.registry import STUDIES, find
        from moe_edge.bench.study import study_root

        study = COMMANDS.get(name, name)
        if study not in STUDIES:
            return  # a root of its own script
        found = study_root(dataclasses.replace(find(study), name=name))
        module = "studies"
    gin.register(name, module=module)(checked(name, found))
    for option in OPTIONS:
        taken = option in inspect.signature(found).parameters
        if taken or name in SHARED.get(option, ()):
            register(option)


def get_root(name: str) -> Callable[..., dict]:
    """The root of that name as gin binds it."""
    register(name)
    return gin.get_configurable(name)


def read_by(name: str) -> list[str]:
    """Names whose bindings the root of that name reads: its own, then its options."""
    parameters = inspect.signature(get_root(name)).parameters
    options = [o for o in OPTIONS if o in parameters or name in SHARED.get(o, ())]
    return [name, *options]


def others(name: str) -> list[str]:
    """Names that a gin file may bind though the root of that name ignores them."""
    from moe_edge.bench.registry import STUDIES

    known = {*ROOTS, *COMMANDS, *OPTIONS, *STUDIES}
    return sorted(known - {name})
