"""transformers loads the shipped model as it is and agrees on its perplexity."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers")):
    pytest.skip("needs the extra `parity`", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_edge.convert.open import DEFAULT_MODEL

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
# Any text will do: what is compared is two programs on the same windows.
TEXT = ROOT / "CONTRIBUTING.md"


def test_evaluate_default_equals_transformers_on_the_same_windows(tmp_path):
    command = [sys.executable, "-m", "launch.evaluate", "--checkpoint=default"]
    command += [f"--text={TEXT}", f"--out_dir={tmp_path / 'out'}", "--window=128"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = json.loads(done.stdout.splitlines()[-1])
    assert ours["checkpoint_hf"] == str(DEFAULT_MODEL)

    tokenizer = AutoTokenizer.from_pretrained(ours["checkpoint_hf"])
    model = AutoModelForCausalLM.from_pretrained(
        ours["checkpoint_hf"], dtype=torch.float32
    ).eval()
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    window, stride = ours["window"], ours["stride"]
    nll, scored, seen = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        part = torch.as_tensor([ids[begin : begin + window]])
        with torch.no_grad():
            log_probs = model(part).logits[0, :-1].double().log_softmax(-1)
        losses = -log_probs.gather(1, part[0, 1:, None])[:, 0].numpy()
        positions = np.arange(begin + 1, begin + part.shape[1])
        fresh = positions >= seen
        nll, scored = nll + losses[fresh].sum(), scored + int(fresh.sum())
        seen = begin + part.shape[1]
    assert ours["tokens"] == scored
    assert ours["perplexity"] == pytest.approx(np.exp(nll / scored), rel=1e-3)
