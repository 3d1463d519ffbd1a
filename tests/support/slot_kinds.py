"""Kinds of slots that exist on the backend under test."""

import jax
import pytest

from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.slots import AliasedSlots, DonatedSlots

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="slots in the host's memory are for CPUs"
)
KINDS = (pytest.param(AliasedSlots, marks=on_cpu), DonatedSlots, IndexedSlots)
OWN = AliasedSlots if jax.default_backend() == "cpu" else DonatedSlots
