"""What MoE-Prism adds, by name (core/tables.py)."""

PLUGINS = (
    ("scheduler", "elastic", "elastic:Elastic"),
    ("scheduler", "qos", "qos:Qos"),
    ("root", "refactor_model", "refactor.run:run_refactor"),
    ("command", "refactor", "commands.refactor:main"),
    ("study", "benchmark_refactor", "studies.speed:STUDY"),
    ("study", "moe_prism_fig10", "studies.studies:STUDIES"),
    ("study", "moe_prism_fig12", "studies.serving_studies:STUDY"),
    ("study", "moe_prism_fig3", "studies.studies:STUDIES"),
    ("study", "moe_prism_fig8", "studies.studies:STUDIES"),
    ("study", "moe_prism_goodput", "studies.serving_scale:STUDY"),
    ("study", "moe_prism_packing", "studies.packing:STUDY"),
    ("study", "moe_prism_table2", "studies.studies:STUDIES"),
    ("study", "moe_prism_table3", "studies.studies:STUDIES"),
)
