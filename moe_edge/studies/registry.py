"""All studies by name; a study's module is imported when it is asked for."""

import importlib
from collections.abc import Callable
from typing import Any

from moe_edge.core.checks import check_known
from moe_edge.studies.study import Study

# Name -> module, which holds STUDY, or STUDIES by name where one file has several.
STUDIES = {
    "benchmark_cluster": "moe_edge.studies.speed.cluster",
    "benchmark_convert": "moe_edge.studies.speed.convert",
    "benchmark_coserve": "moe_edge.studies.speed.coserve",
    "benchmark_decode": "moe_edge.studies.speed.decode",
    "benchmark_devices": "moe_edge.studies.speed.devices",
    "benchmark_forms": "moe_edge.studies.speed.forms",
    "benchmark_large": "moe_edge.studies.speed.large",
    "benchmark_offload": "moe_edge.studies.speed.offload",
    "benchmark_placement": "moe_edge.studies.speed.placement",
    "benchmark_prefill": "moe_edge.studies.speed.decode",
    "benchmark_refactor": "moe_edge.studies.speed.refactor",
    "benchmark_serving": "moe_edge.studies.speed.serving",
    "benchmark_traced": "moe_edge.studies.speed.traced",
    "coserve_fig1": "moe_edge.studies.coserve.measured",
    "coserve_fig11": "moe_edge.studies.coserve.frequencies",
    "coserve_fig13": "moe_edge.studies.coserve.simulated",
    "coserve_fig13_live": "moe_edge.studies.coserve.live",
    "coserve_fig15": "moe_edge.studies.coserve.simulated",
    "coserve_fig17": "moe_edge.studies.coserve.sizes",
    "coserve_fig17_live": "moe_edge.studies.coserve.live",
    "coserve_fig18": "moe_edge.studies.coserve.sizes",
    "coserve_fig19": "moe_edge.studies.coserve.live",
    "coserve_fig5": "moe_edge.studies.coserve.measured",
    "coserve_sensitivity": "moe_edge.studies.coserve.frequencies",
    "coserve_table1": "moe_edge.studies.coserve.hardware",
    "coserve_uma": "moe_edge.studies.coserve.uma",
    "default_shapes": "moe_edge.studies.default_model.shapes",
    "fidelity_default": "moe_edge.studies.fidelity.study",
    "fidelity_quantised": "moe_edge.studies.fidelity.study",
    "moe_prism_fig10": "moe_edge.studies.moe_prism.studies",
    "moe_prism_fig12": "moe_edge.studies.moe_prism.serving_studies",
    "moe_prism_fig3": "moe_edge.studies.moe_prism.studies",
    "moe_prism_fig7": "moe_edge.studies.moe_prism.serving_studies",
    "moe_prism_fig8": "moe_edge.studies.moe_prism.studies",
    "moe_prism_goodput": "moe_edge.studies.moe_prism.serving_scale",
    "moe_prism_table2": "moe_edge.studies.moe_prism.studies",
    "moe_prism_table3": "moe_edge.studies.moe_prism.studies",
    "od_moe_fig10": "moe_edge.studies.od_moe.fig10",
    "od_moe_fig3": "moe_edge.studies.od_moe.studies",
    "od_moe_fig6": "moe_edge.studies.od_moe.studies",
    "od_moe_fig8": "moe_edge.studies.od_moe.live",
    "od_moe_fig9": "moe_edge.studies.od_moe.live",
    "od_moe_one_machine": "moe_edge.studies.od_moe.studies",
    "od_moe_table1": "moe_edge.studies.od_moe.studies",
    "od_moe_table2": "moe_edge.studies.od_moe.table2",
    "prism_fig2": "moe_edge.studies.prism.patterns",
    "prism_fig5": "moe_edge.studies.prism.fig5",
    "prism_fig5_live": "moe_edge.studies.prism.fig5_live",
    "prism_fig6": "moe_edge.studies.prism.fig6",
    "prism_fig7": "moe_edge.studies.prism.fig7",
    "prism_fig7_live": "moe_edge.studies.prism.fig7_live",
    "prism_fig8": "moe_edge.studies.prism.fig8",
    "prism_prediction": "moe_edge.studies.prism.prediction",
    "prism_ranks": "moe_edge.studies.prism.ranks",
    "prism_sensitivity": "moe_edge.studies.prism.sensitivity",
    "prism_table1": "moe_edge.studies.prism.table1",
    "prism_table1_live": "moe_edge.studies.prism.table1_live",
    "prism_table2": "moe_edge.studies.prism.table2",
    "prism_three_servers": "moe_edge.studies.prism.three_servers",
    "quickstart": "moe_edge.studies.quickstart.study",
    "replay_public_traces": "moe_edge.studies.smoe.public_traces",
    "smoe_fig10": "moe_edge.studies.smoe.fig10",
    "smoe_fig11": "moe_edge.studies.smoe.fig11",
    "smoe_fig12": "moe_edge.studies.smoe.fig12",
    "smoe_fig14": "moe_edge.studies.smoe.fig14",
    "smoe_fig17": "moe_edge.studies.smoe.fig17",
    "smoe_fig3": "moe_edge.studies.smoe.fig3",
    "smoe_fig4": "moe_edge.studies.smoe.fig4",
    "smoe_fig6": "moe_edge.studies.smoe.fig6",
    "smoe_table4": "moe_edge.studies.smoe.table4",
    "smoe_ttft": "moe_edge.studies.smoe.ttft",
}


def find(name: str) -> Study:
    """The study of that name.

    Raises:
      ConfigError: an unknown name; the message lists the known ones.
    """
    check_known("study", name, STUDIES)
    module = importlib.import_module(STUDIES[name])
    several = getattr(module, "STUDIES", None)
    return module.STUDY if several is None else several[name]


def later(path: str) -> Callable[..., Any]:
    """The function `module.name` of the studies; called, it imports its module.

    What measures loads JAX. Settings, which do not, are refused before that.
    """
    module, _, name = path.rpartition(".")

    def call(*args):
        measuring = importlib.import_module(f"moe_edge.studies.{module}")
        return getattr(measuring, name)(*args)

    return call
