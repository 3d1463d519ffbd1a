"""What CoServe adds, by name (core/tables.py)."""

PLUGINS = (
    ("root", "coserve", "simulate.coe_run:run_coserve"),
    ("root", "profile_coe", "coe.run_profile:run_profile_coe"),
    ("root", "train_board", "coe.train_board:run_train_board"),
    ("command", "coserve", "commands.coserve:main"),
    ("command", "profile_coe", "commands.profile_coe:main"),
    ("command", "train_board", "commands.train_board:main"),
    ("study", "benchmark_coserve", "studies.speed:STUDY"),
    ("study", "coserve_fig1", "studies.measured:STUDIES"),
    ("study", "coserve_fig11", "studies.frequencies:STUDIES"),
    ("study", "coserve_fig13", "studies.simulated:STUDIES"),
    ("study", "coserve_fig13_live", "studies.live:STUDIES"),
    ("study", "coserve_fig15_live", "studies.live:STUDIES"),
    ("study", "coserve_fig15", "studies.simulated:STUDIES"),
    ("study", "coserve_fig17", "studies.sizes:STUDIES"),
    ("study", "coserve_fig17_live", "studies.live:STUDIES"),
    ("study", "coserve_fig18", "studies.sizes:STUDIES"),
    ("study", "coserve_fig19", "studies.live:STUDIES"),
    ("study", "coserve_fig5", "studies.measured:STUDIES"),
    ("study", "coserve_sensitivity", "studies.frequencies:STUDIES"),
    ("study", "coserve_uma", "studies.uma:STUDY"),
)
