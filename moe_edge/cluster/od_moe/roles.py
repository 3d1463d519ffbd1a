"""Numbers of OD-MoE's processes, and what they say to each other.

main -> shadow    begin   a prompt is about to run
                  token   a decode step begins; tokens, keys and values to align
shadow -> main    predicted  what layers of a step will choose, from the `first` count on
shadow -> workers load       their shares of them
main -> workers   passed     layers are over, and have not asked this worker
shadow -> main    said       all that it had to say has been said before
"""

SCHEDULER, MAIN, SHADOW, FIRST_WORKER = 0, 1, 2, 3


def name_of(process: int) -> str:
    """Of a process: in logs, namespaces, drills and device_bytes."""
    if process >= FIRST_WORKER:
        return f"worker{process - FIRST_WORKER}"
    return ("scheduler", "main", "shadow")[process]
