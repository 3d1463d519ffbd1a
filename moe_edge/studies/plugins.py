"""What stands above the papers, by name: speed, the default model (core/tables.py).

Studies of single papers are here until they stand with them.
"""

PLUGINS = (
    ("study", "benchmark_cluster", "speed.cluster:STUDY"),
    ("study", "benchmark_convert", "speed.convert:STUDY"),
    ("study", "benchmark_decode", "speed.decode:STUDIES"),
    ("study", "benchmark_forms", "speed.forms:STUDY"),
    ("study", "benchmark_large", "speed.large:STUDY"),
    ("study", "benchmark_offload", "speed.offload:STUDY"),
    ("study", "benchmark_prefill", "speed.decode:STUDIES"),
    ("study", "benchmark_serving", "speed.serving:STUDY"),
    ("study", "benchmark_traced", "speed.traced:STUDY"),
    ("study", "default_shapes", "default_model.shapes:STUDY"),
    ("study", "od_moe_fig10", "od_moe.fig10:STUDY"),
    ("study", "od_moe_fig3", "od_moe.studies:STUDIES"),
    ("study", "od_moe_fig6", "od_moe.studies:STUDIES"),
    ("study", "od_moe_fig8", "od_moe.live:STUDIES"),
    ("study", "od_moe_fig9", "od_moe.live:STUDIES"),
    ("study", "od_moe_one_machine", "od_moe.studies:STUDIES"),
    ("study", "od_moe_table1", "od_moe.studies:STUDIES"),
    ("study", "od_moe_table2", "od_moe.table2:STUDY"),
)
