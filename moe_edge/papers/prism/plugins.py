"""What Prism adds, by name (core/tables.py)."""

PLUGINS = (
    ("placer", "latency", "latency_aware:LatencyAware"),
    ("placer", "prism", "prism:Prism"),
    ("study", "benchmark_placement", "studies.speed:STUDY"),
    ("study", "prism_fig2", "studies.patterns:STUDY"),
    ("study", "prism_fig5", "studies.fig5:STUDY"),
    ("study", "prism_fig5_live", "studies.fig5_live:STUDY"),
    ("study", "prism_fig6", "studies.fig6:STUDY"),
    ("study", "prism_fig7", "studies.fig7:STUDY"),
    ("study", "prism_fig7_live", "studies.fig7_live:STUDY"),
    ("study", "prism_fig8", "studies.fig8:STUDY"),
    ("study", "prism_prediction", "studies.prediction:STUDY"),
    ("study", "prism_ranks", "studies.ranks:STUDY"),
    ("study", "prism_sensitivity", "studies.sensitivity:STUDY"),
    ("study", "prism_table1", "studies.table1:STUDY"),
    ("study", "prism_table1_live", "studies.table1_live:STUDY"),
    ("study", "prism_table2", "studies.table2:STUDY"),
    ("study", "prism_three_servers", "studies.three_servers:STUDY"),
)
