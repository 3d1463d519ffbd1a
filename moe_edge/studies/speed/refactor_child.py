"""A process that partitions a folder of activations and says its peak memory.

python -m moe_edge.studies.speed.refactor_child FOLDER LAYERS EXPERTS NEURONS WORK_DIR
"""

import json
import sys
from pathlib import Path

import numpy as np

from moe_edge.refactor.partition.model import PartitionOptions, partition_model
from moe_edge.studies.speed.offload_child import peak_rss_bytes


class FolderSource:
    """`LLL_EEE.npy` files, read as a profile's activations are."""

    def __init__(self, folder: Path, layers: int, experts: int, neurons: int):
        self.folder, self.layers = Path(folder), tuple(range(layers))
        self.num_experts, self.neurons = experts, neurons

    def activations(self, layer: int, expert: int) -> np.ndarray:
        path = self.folder / f"{layer:03}_{expert:03}.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False)

    def gate_weights(self, layer: int, expert: int) -> np.ndarray:
        return np.ones(len(self.activations(layer, expert)), np.float32)


def measure(folder: str, layers: str, experts: str, neurons: str, work: str) -> dict:
    """Partitions all experts on all of their tokens, with the default solver."""
    source = FolderSource(Path(folder), int(layers), int(experts), int(neurons))
    options = PartitionOptions(heldout_ratio=0.0)
    found = partition_model(source, work, options)
    return {
        "seconds": found.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "experts": len(found.experts),
        "shares": found.summary()["shares"]["fitted"],
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
