"""What gin may configure: the root of every script, by the name used in gin files.

`gin.register` leaves plain Python calls untouched: only `launch/common.py`, which
asks gin for a root, sees bindings. Add a root here and a script in launch/. `offload`
is no root: policy files (configs/policies/) set it and hand it to roots. A study is a
root of its own name, registered when it is asked for.
"""

import dataclasses
import functools
from collections.abc import Callable

import gin

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.run import run_evaluate
from moe_edge.evaluate.run_lm_eval import run_lm_eval
from moe_edge.hardware.run_profile_machine import run_profile_machine
from moe_edge.place.run_place import run_place
from moe_edge.profile.run_profile import run_profile
from moe_edge.refactor.run import run_refactor
from moe_edge.simulate.cluster.run import run_simulate
from moe_edge.simulate.replay.run import run_replay
from moe_edge.studies.prism.roots import run_prism_study
from moe_edge.studies.registry import STUDIES, find
from moe_edge.studies.study import study_root
from moe_edge.training.model_card import run_model_card
from moe_edge.training.run import run_pretrain

gin.register("convert_checkpoint", module="convert")(convert_checkpoint)
gin.register("generate", module="engine")(run_generate)
gin.register("offload", module="engine")(OffloadOptions)
gin.register("evaluate", module="evaluate")(run_evaluate)
gin.register("lm_eval", module="evaluate")(run_lm_eval)
gin.register("model_card", module="metrics")(run_model_card)
gin.register("place_experts", module="place")(run_place)
gin.register("pretrain", module="training")(run_pretrain)
gin.register("profile_model", module="profile")(run_profile)
gin.register("profile_machine", module="hardware")(run_profile_machine)
gin.register("refactor_model", module="refactor")(run_refactor)
gin.register("replay", module="simulate")(run_replay)
gin.register("simulate", module="simulate")(run_simulate)
gin.register("study_prism", module="metrics")(run_prism_study)


# Users' commands that run a study under a name of their own.
COMMANDS = {"fidelity": "fidelity_default"}


@functools.cache
def register_study(name: str) -> None:
    """Registers a study (moe_edge/studies/registry.py) under its own name."""
    study = dataclasses.replace(find(COMMANDS.get(name, name)), name=name)
    gin.register(name, module="studies")(study_root(study))


register_study("fidelity")  # policy files bind its `offload`, whatever is run


def get_root(name: str) -> Callable[..., dict]:
    """The root of that name as gin binds it."""
    if name in STUDIES:
        register_study(name)
    return gin.get_configurable(name)
