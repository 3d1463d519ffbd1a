"""OD-MoE (arXiv 2512.03927): main node, shadow, and workers that load on demand."""
