"""Shapes of the models that placements are studied on: what is placed, what it costs.

Only routed experts are placed; everything else of a layer is on every server.
"""

import dataclasses

from moe_edge.core.checks import check_count, check_known
from moe_edge.hardware.cost_model import BlockShape, CostModel, DenseLayer
from moe_edge.hardware.specs import Cluster


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What placement and simulation know of a model.

    Attributes:
      name: of the model.
      num_layers: layers with routed experts.
      num_experts: blocks a layer.
      top_k: blocks a token.
      block: one block.
      dense: the rest of a layer.
      source: where the numbers come from.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    block: BlockShape
    dense: DenseLayer
    source: str

    def __post_init__(self):
        for field in ("num_layers", "num_experts", "top_k"):
            check_count(f"{self.name}: {field}", getattr(self, field))

    @property
    def num_blocks(self) -> int:
        return self.num_layers * self.num_experts

    def costs(self, cluster: Cluster) -> CostModel:
        """The cost model of this model on a cluster that can hold it.

        Raises:
          CapacityError: one copy of the experts does not fit.
        """
        cluster.check_holds(self.num_blocks, self.block.num_bytes)
        return CostModel(cluster, self.block, self.dense)


# Weights of a layer besides the routed experts, each used once a token:
#   Mixtral: q and o 4096 x 4096, k and v 4096 x 1024.
#   DeepSeek-V2-Lite: q 2048 x 3072, kv_a 2048 x 576, kv_b 512 x 4096, o 2048 x 2048,
#   and two shared experts of 3 x 2048 x 1408. Its first layer has no routed experts.
#   Qwen3-30B-A3B: q and o 2048 x 4096, k and v 2048 x 512.
_MIXTRAL_DENSE = 2 * 4096 * 4096 + 2 * 4096 * 1024
_QWEN3_DENSE = 2 * 2048 * 4096 + 2 * 2048 * 512
_DEEPSEEK_DENSE = 2048 * (3072 + 576 + 2048) + 512 * 4096 + 2 * 3 * 2048 * 1408

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="mixtral_8x7b",
            num_layers=32,
            num_experts=8,
            top_k=2,
            block=BlockShape(4096, 14336, 2),
            dense=DenseLayer.of_parameters(_MIXTRAL_DENSE, 2),
            source="mistralai/Mixtral-8x7B-v0.1 config.json; Prism section IV-A",
        ),
        ModelShape(
            name="deepseek_v2_lite",
            num_layers=26,
            num_experts=64,
            top_k=6,
            block=BlockShape(2048, 1408, 2),
            dense=DenseLayer.of_parameters(_DEEPSEEK_DENSE, 2),
            source="deepseek-ai/DeepSeek-V2-Lite config.json (6 routed + 2 shared; "
            "Prism section IV-A calls it 8 active)",
        ),
        ModelShape(
            name="qwen3_30b_a3b",
            num_layers=48,
            num_experts=128,
            top_k=6,
            block=BlockShape(2048, 768, 2),
            dense=DenseLayer.of_parameters(_QWEN3_DENSE, 2),
            source="Qwen/Qwen3-30B-A3B config.json, with 6 instead of 8 chosen, as the "
            "public route trace was recorded",
        ),
    )
}


def model_shape(name: str) -> ModelShape:
    """A model by name.

    Raises:
      ConfigError: an unknown name, with the known ones.
    """
    check_known("model preset", name, MODELS)
    return MODELS[name]
