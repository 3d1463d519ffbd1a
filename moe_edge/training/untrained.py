"""Writes a model of the default model's kind and of any size, with random weights.

    python -m moe_edge.training.untrained ../untrained_1152

Its tokenizer is the default model's, so that studies can give it texts. Only times can
be measured with it: config.json says that the weights are random, and so do results.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from moe_edge.convert.hf_config import RANDOM_SEED
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.core.checks import ConfigError, MoeEdgeError, check_count
from moe_edge.core.files import check_out_dir
from moe_edge.training.default_config import default_config
from moe_edge.training.export import export_hf
from moe_edge.training.options import Start
from moe_edge.training.start import init_params

# At the start of a training run a layer adds so little to the embeddings that all
# routers would choose from the same state. With these the gate of the next layer, asked
# a layer early, knows 63 to 71 % of its experts (in the default model 42 to 67 %).
START = Start(embedding_std=0.5, expert_scale=3.0)
WIDTHS = 96  # a width is a multiple of it: heads of 32, a third for keys and values


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The default model's layers and experts, six times as wide; 0.3 B parameters.

    Attributes:
      d_model: width.
      num_layers: all of them with experts.
      num_experts, top_k: of a layer, and those that a token chooses.
      expert_dim, shared_dim: neurons of an expert and of the shared expert.
    """

    d_model: int = 1152
    num_layers: int = 6
    num_experts: int = 64
    top_k: int = 8
    expert_dim: int = 192
    shared_dim: int = 96

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            check_count(name, value)
        if self.d_model % WIDTHS:
            raise ConfigError(
                f"d_model is {self.d_model}, expected a multiple of {WIDTHS}: heads of "
                "32, a third of them for keys and values"
            )


def write_untrained(
    out_dir: str | Path, sizes: Sizes, seed: int = 0, overwrite: bool = False
) -> None:
    """Writes a Hugging Face folder in bfloat16, the same one for the same seed.

    Args:
      out_dir: the new folder.
      overwrite: replace what it holds.
    Raises:
      ConfigError: more experts of a token than there are; a seed that is none.
      OutputError: the folder cannot be written.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}, expected 0 or more, of 64 bits at most")
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    config = default_config(tokenizer.get_vocab_size(), **dataclasses.asdict(sizes))
    folder = check_out_dir(out_dir, overwrite)  # before weights are drawn
    params = init_params(config, seed, START)
    said = {RANDOM_SEED: seed}
    export_hf(params, config, tokenizer, folder, said=said, overwrite=overwrite)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the folder that a command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m moe_edge.training.untrained")
    parser.add_argument("out_dir", help="the Hugging Face folder to write")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    given = vars(parser.parse_args(arguments))
    aside = {name: given.pop(name) for name in ("out_dir", "seed", "overwrite")}
    try:
        write_untrained(sizes=Sizes(**given), **aside)
    except MoeEdgeError as error:
        sys.exit(f"error: {error}")
    print(f"Random weights, seed {aside['seed']}: {aside['out_dir']}")


if __name__ == "__main__":
    main()
