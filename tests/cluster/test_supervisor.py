"""What processes are started with."""

import os

from moe_edge.cluster.supervisor import _few_threads


def test_more_processes_than_cores_take_one_thread_each():
    cores = len(os.sched_getaffinity(0))
    assert _few_threads(cores) == {}
    assert _few_threads(cores + 1) == {"NPROC": "1"}
