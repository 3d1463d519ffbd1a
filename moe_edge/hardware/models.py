"""Shapes of the models that placements are studied on: what is placed, what it costs.

Only routed experts are placed; everything else of a layer is on every server.
"""

import dataclasses
import functools
import math

from moe_edge.core.checks import check_count, check_known
from moe_edge.hardware.cost_model import BlockShape, CostModel, DenseLayer
from moe_edge.hardware.specs import Cluster
from moe_edge.model.attention_config import AttentionConfig, RopeConfig
from moe_edge.model.config import Mixer, ModelConfig, MoeConfig
from moe_edge.model.quantised import bytes_per_weight


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
      once: what a step computes besides layers with routed experts: the other layers
        and the head.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    block: BlockShape
    dense: DenseLayer
    source: str
    once: DenseLayer = DenseLayer()

    def __post_init__(self):
        for field in ("num_layers", "num_experts", "top_k"):
            check_count(f"{self.name}: {field}", getattr(self, field))

    @classmethod
    def of(
        cls, config: ModelConfig, name: str, source: str, bytes_per_value: float = 2
    ) -> "ModelShape":
        """The shape of a model as its config describes it.

        Args:
          bytes_per_value: of hidden states, and of weights that are not quantised.
        """
        moe, weights = config.moe, layer_weights(config)  # each used once a token
        other = weights + 3 * config.d_model * (config.dense_dim - moe.shared_dim)
        once = len(config.dense_layers) * other + config.vocab_size * config.d_model
        return cls(
            name=name,
            num_layers=config.num_layers - len(config.dense_layers),
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            block=BlockShape(
                config.d_model,
                moe.expert_dim,
                bytes_per_value,
                bytes_per_weight=bytes_per_weight(moe.expert_kind),
            ),
            dense=DenseLayer(2.0 * weights, int(weights * bytes_per_value)),
            source=source,
            once=DenseLayer(2.0 * once, int(once * bytes_per_value)),
        )

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


def layer_weights(config: ModelConfig) -> int:
    """Weights of a layer, routed experts apart, that a token multiplies with: the mean
    of the layers where they differ.

    Projections of attention and the shared expert; the router and norms are small.
    """
    layers = map(config.attention_of, range(config.num_layers))
    all_weights = sum(_attention_weights(each, config.d_model) for each in layers)
    shared = 3 * config.d_model * config.moe.shared_dim
    return all_weights // config.num_layers + shared


def _attention_weights(attention: Mixer, D: int) -> int:
    if attention.has_state:
        shapes = attention.weight_shapes(D).values()
        return sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    H, P = attention.num_heads, attention.head_dim
    if attention.kind == "mla":
        latent, rank = attention.kv_lora_rank, attention.q_lora_rank
        queries = D * H * P if rank is None else rank * (D + H * P)
        keys_values = D * (latent + attention.rope.dim)
        keys_values += latent * H * (attention.nope_dim + attention.v_head_dim)
        out = H * attention.v_head_dim * D
    else:
        queries, out = D * H * P, D * H * attention.value_dim
        keys_values = D * attention.num_kv_heads * (P + attention.value_dim)
    return queries + keys_values + out


def _grouped(heads: int, kv_heads: int, head_dim: int) -> AttentionConfig:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return AttentionConfig(**sizes, rope=RopeConfig(dim=head_dim))


# What shapes ask of a config; positions are not among it.
_config = functools.partial(ModelConfig, max_positions=1)


# name -> (config with the sizes of the published config.json, source)
PUBLISHED = {
    "mixtral_8x7b": (
        _config(
            model_type="mixtral",
            vocab_size=32000,
            attention=_grouped(32, 8, 128),
            moe=MoeConfig(num_experts=8, top_k=2, expert_dim=14336),
            d_model=4096,
            num_layers=32,
        ),
        "mistralai/Mixtral-8x7B-v0.1 config.json; Prism section IV-A",
    ),
    "deepseek_v2_lite": (
        _config(
            model_type="deepseek_v2",
            vocab_size=102400,
            attention=AttentionConfig(
                kind="mla",
                num_heads=16,
                num_kv_heads=16,
                head_dim=192,
                rope=RopeConfig(dim=64),
                kv_lora_rank=512,
                nope_dim=128,
                v_head_dim=128,
            ),
            moe=MoeConfig(
                num_experts=64, top_k=6, expert_dim=1408, shared_dim=2 * 1408
            ),
            d_model=2048,
            num_layers=27,
            dense_layers=(0,),
            dense_dim=10944,
        ),
        "deepseek-ai/DeepSeek-V2-Lite config.json (6 routed + 2 shared; "
        "Prism section IV-A calls it 8 active)",
    ),
    "olmoe_1b_7b": (
        _config(
            model_type="olmoe",
            vocab_size=50304,
            attention=_grouped(16, 16, 128),
            moe=MoeConfig(num_experts=64, top_k=8, expert_dim=1024),
            d_model=2048,
            num_layers=16,
        ),
        "allenai/OLMoE-1B-7B-0924 config.json",
    ),
    "qwen3_30b_a3b": (
        _config(
            model_type="qwen3_moe",
            vocab_size=151936,
            attention=_grouped(32, 4, 128),
            moe=MoeConfig(num_experts=128, top_k=6, expert_dim=768),
            d_model=2048,
            num_layers=48,
        ),
        "Qwen/Qwen3-30B-A3B config.json, with 6 instead of 8 chosen, as the "
        "public route trace was recorded",
    ),
}
MODELS = {
    name: ModelShape.of(config, name, source)
    for name, (config, source) in PUBLISHED.items()
}


def model_shape(name: str) -> ModelShape:
    """A model by name, or ConfigError with the known ones."""
    check_known("model preset", name, MODELS)
    return MODELS[name]
