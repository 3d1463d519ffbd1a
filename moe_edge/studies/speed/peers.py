"""The peer: `transformers` on the same checkpoint, computing in float32.

Optional: without torch and transformers (extra `parity`) the benchmark prints our
figures alone. Both CPU paths of its experts are timed and the best one counts.
"""

import time

import numpy as np

IMPLEMENTATIONS = ("eager", "grouped_mm")


def load_peer(hf_folder: str):
    """A `Peer`, or None where torch or transformers is not installed."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Peer(hf_folder)


class Peer:
    """A `transformers` model with its two expert implementations."""

    def __init__(self, hf_folder: str):
        import torch
        import transformers

        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_folder, dtype=torch.float32
        ).eval()

    def rate(self, implementation: str, prompts, steps: int = 0) -> float:
        """Prompt tokens per second up to the logits after the last token, or greedy
        tokens per second of `steps` steps after the (untimed) prompts.

        Args:
          implementation: one of IMPLEMENTATIONS.
          prompts: int array [B, S].
          steps: decode steps; 0: the prompts are timed.
        """
        tokens = self.torch.as_tensor(np.asarray(prompts))
        self.model.set_experts_implementation(implementation)
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
