"""Shadows of a study's model: one of each precision for all its engines."""

from moe_edge.bench.engines import Bench
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine, shared_shadow


def shadow_in(bench: Bench, precision: str) -> ShadowEngine:
    """The model's shadow of a precision."""
    return shared_shadow(bench.resident.weights, precision, bench.companions)
