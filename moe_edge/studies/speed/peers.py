"""The peers of suites `decode` and `prefill`, with the same weights.

Optional: `transformers` in float32 (extra `parity`), both CPU paths of its experts, and
llama.cpp at the type of the file (extra `peers`). Without them the suites print our
figures alone.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from moe_edge.convert.hf_reader import HfReader
from moe_edge.studies.speed.llama_cpp import LlamaCpp, write_gguf

MOST_ROWS, MOST_TOKENS = 8, 640  # of the suites
TYPES = {"float32": "F32", "bfloat16": "BF16"}  # of a file -> llama.cpp's


def load_peers(
    hf_folder: Path,
    work_dir: Path | None = None,
    kind: str | None = None,
    dense: str | None = None,
) -> list:
    """The peers that are installed, with `name`, `ways`, `build` and `rate`.

    Args:
      work_dir: where the GGUF file is kept for a next run; None: nowhere.
      kind: what experts are quantised to, which llama.cpp alone does, and `dense` all
        other matrices. None: as stored.
    """
    found = []
    if kind is None and installed("torch", "transformers"):
        found.append(Transformers(str(hf_folder)))
    if installed("llama_cpp", "gguf"):
        stored = TYPES[HfReader(hf_folder).config.hf_config["dtype"]]
        kind, dense = (kind or stored).upper(), (dense or stored).upper()
        name = kind if kind == dense else f"{kind}_{dense}"
        with ExitStack() as stack:
            kept = work_dir or stack.enter_context(tempfile.TemporaryDirectory())
            folder = Path(kept) / f"{hf_folder.name}_{name}_gguf"
            file = write_gguf(hf_folder, folder, kind, dense)
            found.append(LlamaCpp(file, kind, MOST_ROWS, MOST_TOKENS))
    return found


def installed(*packages: str) -> bool:
    """Whether these packages can be imported."""
    try:
        for name in packages:
            __import__(name)
    except ImportError:
        return False
    return True


def on_cuda() -> bool:
    """Whether `transformers` could run on a GPU here."""
    if not installed("torch", "transformers"):
        return False
    import torch

    return torch.cuda.is_available()


class Transformers:
    """A `transformers` model with its two expert implementations."""

    ways = ("eager", "grouped_mm")

    def __init__(self, hf_folder: str):
        torch, transformers = self._begin("float32", "cpu")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_folder, dtype=torch.float32
        ).eval()

    @classmethod
    def random(cls, hf_config: dict) -> "Transformers":
        """A model of this shape on the GPU, in bfloat16; its weights are random."""
        self = cls.__new__(cls)
        torch, transformers = self._begin("bfloat16", "cuda")
        config = transformers.AutoConfig.for_model(**hf_config)
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            ).eval()
        return self

    def _begin(self, dtype: str, device: str):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.device, self.name = torch, device, f"transformers {dtype}"
        versions = transformers.__version__, torch.__version__
        self.build = f"transformers {versions[0]}, torch {versions[1]}"
        return torch, transformers

    def rate(self, way: str, prompts, steps: int = 0) -> float:
        """Prompt tokens per second up to the logits after the last token, or greedy
        tokens per second of `steps` steps after the (untimed) prompts.

        Args:
          way: one of `ways`: how experts are computed.
          prompts: int array [B, S].
          steps: decode steps; 0: the prompts are timed.
        """
        tokens = self.torch.as_tensor(np.asarray(prompts), device=self.device)
        self.model.set_experts_implementation(way)
        with self.torch.inference_mode():
            started = time.perf_counter()
            out = self.model(tokens, use_cache=True, logits_to_keep=1)
            token = out.logits.argmax(-1)
            token.tolist()
            if not steps:
                return tokens.numel() / (time.perf_counter() - started)
            started = time.perf_counter()
            for _ in range(steps):
                cache = out.past_key_values
                out = self.model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
                token.tolist()
            return steps * len(prompts) / (time.perf_counter() - started)
