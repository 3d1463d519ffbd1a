"""Mode tokens of moe-edge evaluate: logits of given tokens, into a file."""

from pathlib import Path

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import OutputError
from moe_edge.core.run_folder import RunFolder
from moe_edge.engine.load import check_checkpoint, load_engine


def run_logits(
    run: RunFolder, checkpoint, tokens, logits, *, offload, **options
) -> dict:
    from moe_edge.evaluate.logits import (
        check_logits_path,
        read_tokens,
        rows_together,
        write_logits,
    )
    from moe_edge.evaluate.stepwise import Stepwise

    tokens_BS = read_tokens(tokens)
    if Path(logits).resolve().is_relative_to(run.path):
        # The results folder appears as a whole, and an old one disappears so.
        raise OutputError(
            f"logits file {logits} is inside the results folder {run.path}; name a "
            "file next to it"
        )
    path = check_logits_path(logits, run.overwrite)
    given = {"with_tokenizer": False, "offload": offload, **options}
    if offload is not None:
        vocab_size = open_checkpoint(checkpoint).config.vocab_size
        given["batch"] = rows_together(tokens_BS.shape, vocab_size)
        given["capacity"] = tokens_BS.shape[1]
    if run.dry_run:
        check_checkpoint(checkpoint, **given)
        return {"mode": "tokens", "logits": str(path)}
    loaded = load_engine(checkpoint, **given)
    engine = loaded.engine
    if offload is not None and not offload.lossless:
        engine = Stepwise(engine)
    try:
        shape = write_logits(engine, tokens_BS, path)
    except OSError as error:
        raise OutputError(f"logits file {path} cannot be written: {error}") from error
    return {
        "logits": str(path),
        "shape": shape,
        "checkpoint": loaded.name,
        "checkpoint_hf": loaded.hf_source,
    }
