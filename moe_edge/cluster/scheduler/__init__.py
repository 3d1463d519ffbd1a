"""Process 0: requests, their tokens, drills, losses, what a run leaves."""
