"""Machines and links by name: the papers' test beds and what stands in such rooms.

Every number comes from a data sheet (peak, dense, FP16 with FP32 accumulation) times
a stated efficiency, because the cost model wants achievable rates:

    arithmetic 0.6, memory 0.8, host links 0.8 of the peak

are assumptions of ours, as is `CALL_S`, the fixed time of a call (a few kernel
launches). `moe-edge profile_machine` replaces all of them by measurements.
`checked=False` marks what could not be held against a source; its `source` says what.
"""

import dataclasses
from pathlib import Path

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.files import check_there
from moe_edge.core.json_reader import read_json
from moe_edge.hardware.specs import Device, Gpu, Link

FORMAT_VERSION = 2  # of a machine.json
READ_VERSIONS = (1, 2)  # 1 has no `models`
ARITHMETIC_SHARE = 0.6
MEMORY_SHARE = 0.8
HOST_SHARE = 0.8
CALL_S = 30e-6
HOST_LATENCY_S = 10e-6  # of one copy; assumed
LAN_LATENCY_S = 200e-6  # switch and protocol stacks, one way; assumed

_TWICE = "FP16 tensor rate with FP32 accumulation = 2x the FP32 rate (GeForce)"

# name -> (GB, peak TFLOP/s, peak GB/s, host link, all checked, source)
DEVICES = {
    "rtx_3080": (10, 59.5, 760.3, "pcie4_x16", False, f"OD-MoE section 4.2; public "
                 f"lists: 760.3 GB/s, 29.77 TFLOP/s FP32; {_TWICE}, not checked"),
    "rtx_3080_ti": (12, 68.2, 912.4, "pcie4_x16", False, f"SMoE table III, CoServe "
                    f"table 1 (12 GB); 912.4 GB/s public lists; {_TWICE}, not checked"),
    "rtx_4060_ti": (16, 44.1, 288.0, "pcie4_x8", False, f"SMoE table III (16 GB); "
                    f"288 GB/s, 22.1 TFLOP/s FP32 public lists; {_TWICE}; x8 lanes not "
                    "checked"),
    "rtx_4080": (16, 97.5, 716.8, "pcie4_x16", False, f"MoE-Prism fig. 8 (16 GB); "
                 f"716.8 GB/s public lists; {_TWICE}, not checked"),
    "rtx_4090": (24, 165.2, 1008.0, "pcie4_x16", True, "MoE-Prism fig. 8 (24 GB); "
                 "waredb.com: 1008 GB/s, 165.15 TFLOP/s"),
    "rtx_3090": (24, 71.2, 936.2, "pcie4_x16", False, f"OD-MoE section 4.1; public "
                 f"lists: 936.2 GB/s, 35.58 TFLOP/s FP32; {_TWICE}, not checked"),
    "a6000": (48, 154.8, 768.0, "pcie4_x16", False, "SMoE table III (48 GB); 768 GB/s "
              "public lists; 154.8 TFLOP/s (4x FP32) not checked"),
    "a100_40g": (40, 312.0, 1555.0, "pcie4_x16", True, "Prism section IV-A; NVIDIA "
                 "A100 data sheet: 1555 GB/s, 312 TFLOP/s, PCIe Gen4"),
    "h100": (80, 989.4, 3350.0, "pcie5_x16", True, "NVIDIA H100 SXM5 figures: 3.35 "
             "TB/s, 989.4 TFLOP/s, PCIe Gen5"),
    "h200": (141, 989.4, 4800.0, "pcie5_x16", True, "NVIDIA H200 figures: 141 GB, "
             "4.8 TB/s; arithmetic as H100"),
    "apple_m2": (24, 3.6, 100.0, "unified", False, "CoServe table 1 (24 GB); 100 GB/s "
                 "and 3.6 TFLOP/s (10-core GPU, FP32) not checked"),
}  # fmt: skip

# GB/s of one direction: lanes x GT/s x 128/130 / 8 (PCI-SIG encoding).
LINKS = {
    "pcie4_x8": 8 * 16 * 128 / 130 / 8,
    "pcie4_x16": 16 * 16 * 128 / 130 / 8,
    "pcie5_x16": 16 * 32 * 128 / 130 / 8,
    "unified": 100.0,  # a copy inside the one memory of an Apple M2
}


def device(name: str) -> Device:
    """A device by name (DEVICES), or ConfigError with the known ones."""
    check_known("device preset", name, DEVICES)
    memory_gb, tflops, gb_per_s, _, checked, source = DEVICES[name]
    return Device(
        name=name,
        memory_bytes=memory_gb * 10**9,
        flops_per_s=ARITHMETIC_SHARE * tflops * 1e12,
        memory_bytes_per_s=MEMORY_SHARE * gb_per_s * 1e9,
        call_s=CALL_S,
        source=f"{source}; x{ARITHMETIC_SHARE} and x{MEMORY_SHARE} assumed",
        checked=checked,
    )


def host_link(name: str) -> Link:
    """A link from host memory to a device by name, one of LINKS."""
    return Link(
        bytes_per_s=HOST_SHARE * LINKS[name] * 1e9,
        latency_s=HOST_LATENCY_S,
        source=f"peak {LINKS[name]:.2f} GB/s x{HOST_SHARE} assumed",
        checked=name != "unified",
    )


def lan(mbps: float, latency_s: float = LAN_LATENCY_S) -> Link:
    """A network of `mbps` megabits (10^6) a second, without protocol overhead."""
    if not mbps > 0:
        raise ConfigError(f"network rate must be above 0 Mbps, got {mbps}")
    return Link(
        bytes_per_s=mbps * 1e6 / 8,
        latency_s=latency_s,
        source=f"{mbps:g} Mbps as stated; latency {latency_s * 1e6:g} us assumed",
    )


def gpu(name: str, expert_memory_share: float = 1.0) -> Gpu:
    """A GPU on its usual host link.

    Args:
      name: a device preset, or the path of a machine.json (`profile_machine`).
      expert_memory_share: part of its memory that experts may use.
    """
    if not 0 < expert_memory_share <= 1:
        raise ConfigError(
            f"expert_memory_share must lie in (0, 1], got {expert_memory_share}"
        )
    if name.endswith(".json"):
        built = read_machine(name)
    else:
        built = Gpu(device=device(name), host_link=host_link(DEVICES[name][3]))
    limit = int(expert_memory_share * built.device.memory_bytes)
    return dataclasses.replace(built, expert_memory_bytes=limit)


def read_machine(path: str | Path) -> Gpu:
    """A measured machine, usable wherever a GPU preset is.

    Raises:
      ConfigError: no machine file, or another version; FileNotFoundError.
    """
    path = Path(path)
    check_there(path, "--cluster or a GPU of it:", "moe-edge profile_machine writes it")
    stored = read_json(path)
    try:
        version = stored["format_version"]
        device, link = stored["device"], stored["host_link"]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is no machine file ({error!r}); moe-edge profile_machine writes "
            "them"
        ) from error
    if version not in READ_VERSIONS:
        raise ConfigError(
            f"{path} has format_version {version}, expected {FORMAT_VERSION} or 1: "
            "measure again with moe-edge profile_machine"
        )
    try:
        return Gpu(device=Device(**device), host_link=Link(**link))
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; measure again") from error
