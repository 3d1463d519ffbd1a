"""The transport `jax`: ppermute between two processes, blocks by pulls."""
