"""Slow networks on one machine, and what crosses an interface."""
