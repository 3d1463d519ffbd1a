"""The root of `moe-edge prune`: a checkpoint without the experts that matter least."""

from typing import Any

import numpy as np

from moe_edge.convert.open import check_floats, check_unpruned, open_checkpoint
from moe_edge.convert.pruned import write_pruned
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, OutputError, check_known
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.model.pruned import pruned_config
from moe_edge.profile.reader import open_profile
from moe_edge.profile.saliency import frequency, keep_best, reap

RULES = ("reap", "frequency")


@root
def run_prune(
    run: RunFolder,
    *,
    profile: str,
    checkpoint: str = "default",
    remove: float = 0.25,
    by: str = "reap",
) -> dict[str, Any]:
    """Writes a checkpoint without the experts that matter least to a profile's texts.

    The same number of experts is removed from each layer. Lossy: moe-edge fidelity
    --checkpoint DIR --reference CHECKPOINT says how much. Texts of the profile should
    be like those that will be served: on other tasks a pruned model loses much more
    than its perplexity on prose says.

    Args:
      run: folder of the new checkpoint, in our format.
      profile: folder of moe-edge profile_model, of the same checkpoint.
      checkpoint: the model: folder (Hugging Face's or ours), GGUF file or `default`.
      remove: share of each layer's experts, above 0 and below 1.
      by: reap (mean of gate weight times norm of the output, over the tokens that chose
        an expert) or frequency (how often it is chosen).
    Returns:
      experts (left in a layer), choices_lost (share of the profile's choices whose
      expert is gone), bytes (of the experts' records), content_sha256.
    Raises:
      MoeEdgeError: bad input.
    """
    check_known("rule", by, RULES)
    if isinstance(remove, bool) or not 0 < remove < 1:
        raise ConfigError(
            f"remove is {remove}, expected a share of the experts above 0 and below 1 "
            "such as 0.25"
        )
    reader = open_checkpoint(checkpoint)
    check_floats(reader, "pruning")
    check_unpruned(reader, "pruning")
    run.check_apart(reader.path, profile)
    E = reader.config.moe.num_experts
    left = E - round(remove * E)
    pruned_config(reader.config, {0: [*range(left)]})  # refuses what cannot be
    if left == E:
        raise ConfigError(f"{remove} of {E} experts is none; remove more")
    opened = open_profile(profile)
    opened.check(reader.content_sha256())
    if reader.tokenizer_path is not None:
        load_tokenizer(reader)  # a broken one is refused before it is copied
    if run.dry_run:
        return {"dry_run": True, "experts": left}
    counted_LE = frequency(opened)
    scores_LE = reap(reader, opened) if by == "reap" else counted_LE
    kept = keep_best(scores_LE, opened.layers, left)
    stays = [counted_LE[i, ids].sum() for i, ids in enumerate(kept.values())]
    origin = {
        "by": by,
        "parent_sha256": opened.content_sha256,
        "profile": {"tokens": opened.info["tokens"], "domains": list(opened.domains)},
    }
    try:
        with run.writing() as folder:
            digest, size = write_pruned(reader, kept, folder, origin)
    except OSError as error:
        raise OutputError(f"writing {run.out_dir} failed: {error}") from error
    return {
        "experts": left,
        "choices_lost": round(1 - float(np.mean(stays)), 4),
        "bytes": size,
        "content_sha256": digest,
    }
