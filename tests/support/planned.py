"""Costs and machine files as a calibration would write them."""

from moe_edge.planner.costs import ModelCosts

COSTS = ModelCosts(
    batch=1,
    layered_s=0.01,
    layer_share=0.8,
    per_predictor_s={"none": 0.01, "previous": 0.012},
    miss_host_s={"none": [[0.001, 1e-4], [0.002, 2e-4]], "previous": [[0.001, 1e-4]]},
    copy_s=0.001,
    prefill_s={"128": {"1": 0.1}},
    prefill_block_s=[[0.001, 0.001]],
    block_bytes=1000,
    dense_bytes=5000,
    noise=0.02,
    temperature=1.0,
    steps=100,
)


def stored_machine(version: int) -> dict:
    """A machine.json without models."""
    device = {"name": "here", "memory_bytes": 10**9, "flops_per_s": 1e9}
    device |= {"memory_bytes_per_s": 1e9, "source": "measured: cpu, float32"}
    link = {"bytes_per_s": 1e9, "latency_s": 0.0, "source": "measured"}
    return {"format_version": version, "device": device, "host_link": link}
