"""What gin may configure: the root of every script, by the name used in gin files.

`gin.register` leaves plain Python calls untouched: only `launch/common.py`, which
asks gin for a root, sees bindings. Add a root here and a script in launch/. `offload`
is no root: policy files (configs/policies/) set it and hand it to roots.
"""

import gin

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.run import run_evaluate
from moe_edge.metrics.fidelity_card import run_fidelity
from moe_edge.metrics.model_card import run_model_card
from moe_edge.metrics.quickstart import run_quickstart
from moe_edge.metrics.study_accuracy import run_accuracy
from moe_edge.metrics.study_offload import run_study
from moe_edge.metrics.study_tpot import run_tpot
from moe_edge.simulate.run_replay import run_replay
from moe_edge.training.run import run_pretrain

gin.register("convert_checkpoint", module="convert")(convert_checkpoint)
gin.register("generate", module="engine")(run_generate)
gin.register("offload", module="engine")(OffloadOptions)
gin.register("evaluate", module="evaluate")(run_evaluate)
gin.register("fidelity", module="metrics")(run_fidelity)
gin.register("model_card", module="metrics")(run_model_card)
gin.register("pretrain", module="training")(run_pretrain)
gin.register("quickstart", module="metrics")(run_quickstart)
gin.register("replay", module="simulate")(run_replay)
gin.register("study", module="metrics")(run_study)
gin.register("study_accuracy", module="metrics")(run_accuracy)
gin.register("study_tpot", module="metrics")(run_tpot)
