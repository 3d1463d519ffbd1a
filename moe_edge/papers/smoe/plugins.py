"""What SMoE adds, by name (core/tables.py)."""

PLUGINS = (
    ("eviction", "smoe_score", "evict_score:SmoeScore"),
    ("predictor", "smoe_partial", "partial_state:PartialState"),
    ("route", "substitute", "substitute:Substitute"),
    ("study", "replay_public_traces", "studies.public_traces:STUDY"),
    ("study", "smoe_fig10", "studies.fig10:STUDY"),
    ("study", "smoe_fig11", "studies.fig11:STUDY"),
    ("study", "smoe_fig12", "studies.fig12:STUDY"),
    ("study", "smoe_fig14", "studies.fig14:STUDY"),
    ("study", "smoe_fig17", "studies.fig17:STUDY"),
    ("study", "smoe_fig3", "studies.fig3:STUDY"),
    ("study", "smoe_fig4", "studies.fig4:STUDY"),
    ("study", "smoe_fig6", "studies.fig6:STUDY"),
    ("study", "smoe_table4", "studies.table4:STUDY"),
    ("study", "smoe_ttft", "studies.ttft:STUDY"),
)
