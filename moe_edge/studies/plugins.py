"""What stands above the papers, by name: speed, the default model (core/tables.py).

Studies of single papers are here until they stand with them.
"""

PLUGINS = (
    ("study", "better_together", "composition.settings:STUDY"),
    ("study", "benchmark_cluster", "speed.cluster:STUDY"),
    ("study", "benchmark_convert", "speed.convert:STUDY"),
    ("study", "benchmark_decode", "speed.decode:STUDIES"),
    ("study", "benchmark_devices", "speed.devices:STUDY"),
    ("study", "benchmark_forms", "speed.forms:STUDY"),
    ("study", "benchmark_large", "speed.large:STUDY"),
    ("study", "benchmark_offload", "speed.offload:STUDY"),
    ("study", "benchmark_prefill", "speed.decode:STUDIES"),
    ("study", "benchmark_serving", "speed.serving:STUDY"),
    ("study", "benchmark_traced", "speed.traced:STUDY"),
    ("study", "default_shapes", "default_model.shapes:STUDY"),
    ("study", "default_tasks", "default_model.tasks:STUDY"),
    ("study", "planner_errors", "planning.errors:STUDY"),
)
