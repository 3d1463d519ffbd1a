"""What OD-MoE adds, by name (core/tables.py)."""

PLUGINS = (
    ("predictor", "shadow", "shadow.predictor:Shadow"),
    ("mode", "od_moe", "options:MODE"),
    ("study", "od_moe_fig10", "studies.fig10:STUDY"),
    ("study", "od_moe_fig3", "studies.studies:STUDIES"),
    ("study", "od_moe_fig6", "studies.studies:STUDIES"),
    ("study", "od_moe_fig8", "studies.live:STUDIES"),
    ("study", "od_moe_fig9", "studies.live:STUDIES"),
    ("study", "od_moe_one_machine", "studies.studies:STUDIES"),
    ("study", "od_moe_prefill", "studies.prefill:STUDY"),
    ("study", "od_moe_table1", "studies.studies:STUDIES"),
    ("study", "od_moe_table2", "studies.table2:STUDY"),
)
