"""Numbers of a cluster's processes."""

SCHEDULER = 0
FIRST = 1  # the process of server 0; the others follow
MAIN, SHADOW, FIRST_WORKER = 1, 2, 3  # of OD-MoE
