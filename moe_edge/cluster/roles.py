"""Numbers and names of a cluster's processes."""

SCHEDULER = 0
FIRST = 1  # the process of server 0; the others follow
MAIN, SHADOW, FIRST_WORKER = 1, 2, 3  # of OD-MoE


def name_of(mode: str, process: int) -> str:
    """Of a process: in logs, namespaces, drills and device_bytes."""
    if process == SCHEDULER:
        return "scheduler"
    if mode == "prism":
        return f"server{process - FIRST}"
    if process >= FIRST_WORKER:
        return f"worker{process - FIRST_WORKER}"
    return "main" if process == MAIN else "shadow"
