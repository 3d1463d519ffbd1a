"""One policy of each kind; entry points in pyproject.toml name them to moe_edge."""
