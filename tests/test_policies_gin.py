"""Every file of configs/policies/ builds options that a model can run with."""

import gin
import pytest

from moe_edge.configurables import get_root, others, register
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from tests.test_configs import ROOT, clean_gin  # noqa: F401  an autouse fixture

FILES = sorted((ROOT / "configs" / "policies").glob("*.gin"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_policy_file_builds(path):
    register("offload")
    gin.parse_config_file(str(path), skip_unknown=others("offload"))
    text = path.read_text()
    assert text.startswith("# ")
    options = gin.get_configurable("offload")()
    assert type(options) is OffloadOptions
    assert options.lossless == ("lossy" not in text)
    engine = load_engine("default", with_tokenizer=False, offload=options).engine
    assert engine.lossless == options.lossless
    engine.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_budget_flag_keeps_the_policies(path):
    get_root("generate")
    gin.parse_config_file(str(path), skip_unknown=others("generate"))
    gin.parse_config("generate.prompt = ['a']\ngenerate.dry_run = True")
    gin.parse_config("generate.device_memory = '30%'\ngenerate.out_dir = 'nowhere'")
    assert get_root("generate")()["dry_run"] is True


def test_there_are_policy_files():
    assert {"lru", "smoe", "stale_gate"} <= {path.stem for path in FILES}
