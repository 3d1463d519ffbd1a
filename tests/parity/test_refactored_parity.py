"""Stock transformers runs exported refactored models and agrees with ours."""

import importlib.util
import json

import numpy as np
import pytest

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers")):
    pytest.skip("needs the extra `parity`", allow_module_level=True)

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.refactored_config import EXPORTED
from moe_edge.engine.load import load_engine
from tests.parity.models import CASES, FAMILIES, hf_checkpoint, hf_logits
from tests.support.refactored import UNGROUPED, WIDE, write_random
from tests.support.tiny_checkpoints import raw_config
from tests.support.tiny_models import score_all

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

LIMIT = 1e-4  # of two implementations in float32, in standard deviations
CASES_OF_ROUTERS = ("olmoe-norm", "deepseek_v2-greedy", "deepseek_v3-halves")


@pytest.mark.parametrize(
    "case", [*(f for f in FAMILIES if f in EXPORTED), *CASES_OF_ROUTERS]
)
def test_transformers_agrees_at_multiples_of_u(case, tmp_path, monkeypatch):
    family, changes = CASES[case]
    known = raw_config(family)
    wide = {name: width for name, width in WIDE.items() if name in known}
    changes = changes | wide | UNGROUPED.get(family, {})
    monkeypatch.setitem(CASES, "wide", (family, changes))
    parent = hf_checkpoint("wide", tmp_path / "hf")
    ours = write_random(parent, tmp_path / "r")
    exported = tmp_path / "out"
    convert_checkpoint(ours, exported, to="hf", progress=False)
    ids_BS = np.random.default_rng(0).integers(0, 101, (2, 70))
    # At the parent's own K it is the parent, by transformers alone.
    original, got = (hf_logits(folder, ids_BS).numpy() for folder in (parent, exported))
    assert original.std() > 0.1
    assert np.abs(got - original).max() / original.std() <= LIMIT
    # At another, of two whole experts, it is ours.
    config_path = exported / "config.json"
    config = json.loads(config_path.read_text())
    name = "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"
    config[name] = 8
    config_path.write_text(json.dumps(config))
    fewer = hf_logits(exported, ids_BS).numpy()
    loaded = load_engine(ours, with_tokenizer=False, k=8)
    expected = np.stack(score_all(loaded.engine, ids_BS.tolist()))
    assert np.abs(fewer - expected).max() / expected.std() <= LIMIT
    assert np.abs(fewer - original).max() / original.std() > 100 * LIMIT
