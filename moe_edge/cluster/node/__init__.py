"""What runs in every process that holds weights: engine, blocks, calls, answers."""
