import pytest

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.hardware.clusters import (
    CLUSTERS,
    PRISM_MEMORY_SHARE,
    build_cluster,
    cluster_for,
    mixed_cluster,
    prism_cluster,
    servers_of,
)
from moe_edge.hardware.models import MODELS, ModelShape, model_shape
from moe_edge.hardware.presets import DEVICES, LINKS, device, gpu, host_link, lan
from tests.convert.test_families import DEEPSEEK_V2_LITE
from tests.support.tiny_checkpoints import CONFIGS


def test_every_preset_builds_and_names_its_source():
    for name in DEVICES:
        assert device(name).source and gpu(name).host_link.source
    for name in LINKS:
        assert host_link(name).source
    for name in CLUSTERS:
        assert build_cluster(name).num_servers == 3


def test_achievable_rates_are_below_the_data_sheet():
    assert device("a100_40g").memory_bytes == 40 * 10**9
    assert device("a100_40g").flops_per_s == pytest.approx(0.6 * 312e12)
    assert device("a100_40g").memory_bytes_per_s == pytest.approx(0.8 * 1555e9)
    assert host_link("pcie4_x16").bytes_per_s == pytest.approx(0.8 * 31.508e9, rel=1e-4)
    assert lan(500).bytes_per_s == 62.5e6


def test_numbers_that_were_not_checked_say_so():
    assert not device("apple_m2").checked
    assert device("rtx_4090").checked
    for name in DEVICES:
        assert device(name).checked == ("not checked" not in device(name).source)


def test_prism_cluster_holds_what_the_paper_says():
    cluster = prism_cluster(expert_memory_share=PRISM_MEMORY_SHARE["mixtral_8x7b"])
    block = MODELS["mixtral_8x7b"].block
    assert block.num_bytes == 3 * 4096 * 14336 * 2
    assert [s.tolist() for s in cluster.slots(block.num_bytes)] == [
        [79],
        [79],
        [79, 79],
    ]
    assert prism_cluster(256).num_servers == 192


def test_cluster_for_gives_a_model_its_share_of_prisms_memory():
    shape = model_shape("mixtral_8x7b")
    cluster_for(shape.name, "prism").check_holds(shape.num_blocks, 352_321_536)
    told = cluster_for(shape.name, "prism", {"expert_memory_share": 0.5, "mbps": 100})
    assert told.servers[0].gpus[0].expert_memory_bytes == 20 * 10**9
    assert told.network.bytes_per_s == 12.5e6
    assert cluster_for("qwen3_30b_a3b", "prism") == build_cluster("prism")
    assert cluster_for(shape.name, "mixed") == build_cluster("mixed")


def test_mixed_cluster_has_slow_lines_both_ways():
    cluster = mixed_cluster(slow_servers=(2,), mbps=500, slow_mbps=100)
    rates = [[cluster.link(n, m).bytes_per_s for m in range(3)] for n in range(3)]
    assert rates[0][1] == 62.5e6
    assert {rates[0][2], rates[2][0], rates[1][2], rates[2][1]} == {12.5e6}


def test_model_shapes_are_the_published_ones():
    # Experts' share of the published totals: 46.7 and 15.7 billion parameters.
    for name, billions in (("mixtral_8x7b", 45.1), ("deepseek_v2_lite", 14.4)):
        shape = model_shape(name)
        assert shape.num_blocks * shape.block.num_bytes / 2e9 == pytest.approx(
            billions, abs=0.05
        )
    assert model_shape("deepseek_v2_lite").num_blocks == 1664


@pytest.mark.parametrize(
    "name, raw",
    [
        ("deepseek_v2_lite", DEEPSEEK_V2_LITE),
        (
            "mixtral_8x7b",
            {
                **CONFIGS["mixtral"],
                "head_dim": None,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "vocab_size": 32000,
            },
        ),
        (
            "olmoe_1b_7b",
            {
                **CONFIGS["olmoe"],
                "hidden_size": 2048,
                "intermediate_size": 1024,
                "num_attention_heads": 16,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 16,
                "num_key_value_heads": 16,
                "vocab_size": 50304,
            },
        ),
        (
            "qwen3_30b_a3b",
            {
                "model_type": "qwen3_moe",
                **CONFIGS["qwen3_moe"],
                "decoder_sparse_step": 1,
                "head_dim": 128,
                "hidden_size": 2048,
                "moe_intermediate_size": 768,
                "num_attention_heads": 32,
                "num_experts": 128,
                "num_experts_per_tok": 6,  # as its public trace; published: 8
                "num_hidden_layers": 48,
                "num_key_value_heads": 4,
                "vocab_size": 151936,
            },
        ),
    ],
)
def test_model_presets_are_the_shapes_of_published_configs(name, raw):
    config = config_from_hf({"model_type": name.split("_")[0], **raw})
    preset = model_shape(name)
    assert ModelShape.of(config, name, preset.source) == preset


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ConfigError,
        match="unknown device preset 'v100'; did you mean 'h100'. known: a100",
    ):
        device("v100")
    with pytest.raises(
        ConfigError, match="unknown model preset 'gpt'; known: deepseek"
    ):
        model_shape("gpt")
    with pytest.raises(
        ConfigError, match="unknown cluster preset 'x'; known: mixed, p"
    ):
        build_cluster("x")


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="cluster preset prism: .*'gpus'"):
        build_cluster("prism", gpus=3)
    with pytest.raises(ConfigError, match="multiple of 4, got 6"):
        prism_cluster(6)
    with pytest.raises(ConfigError, match="network rate must be above 0 Mbps, got -5"):
        lan(-5)
    with pytest.raises(ConfigError, match=r"must lie in \(0, 1\], got 1.5"):
        gpu("a6000", 1.5)
    with pytest.raises(ConfigError, match="share has 2 numbers for 1 servers"):
        servers_of([["h100"]], [0.5, 0.5])
    for wrong in ("x", ["a"], [[1], [1, 2]], {}, None):
        with pytest.raises(ConfigError, match="memory_share is .* one number or one"):
            servers_of([["h100"]], wrong)


def test_model_larger_than_the_cluster_is_refused():
    with pytest.raises(CapacityError, match=r"holds 112 .* needs 256: .* are missing"):
        model_shape("mixtral_8x7b").costs(prism_cluster(expert_memory_share=0.25))
