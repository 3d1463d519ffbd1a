"""A tiny run, made once for the tests of training and of the model card."""

import functools

import pytest

from moe_edge.training import evaluation, loop, run, step
from moe_edge.training import text as text_module
from tests.support.slow_cases import slow

TINY = {
    "data_dir": "no-such-folder",
    "train_tokens": 6144,
    "decay_tokens": 2048,
    "warmup_tokens": 1024,
    "batch_tokens": 1024,
    "vocab_size": 400,
    "d_model": 32,
    "num_layers": 2,
    "num_experts": 4,
    "top_k": 2,
    "expert_dim": 8,
    "shared_dim": 16,
    "task_characters": 4000,
}


# Two runs of one config, and its card, share their programs.
make_train_step = functools.cache(step.make_train_step)
make_eval_step = functools.cache(step.make_eval_step)


@pytest.fixture(scope="session", params=slow("3 and 3 steps"))
def tiny_run(tmp_path_factory):
    """A run of 3 steps, resumed to 6; its tests are slow ones."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_STDLIB_BYTES", 30_000)
        patch.setattr(run, "EVAL_ROWS", 2)
        patch.setattr(loop, "make_train_step", make_train_step)
        patch.setattr(evaluation, "make_eval_step", make_eval_step)
        first = run.run_pretrain(str(folder), **TINY | {"train_tokens": 3072})
        second = run.run_pretrain(str(folder), **TINY, config_text=lambda: "run = 2")
    return folder, first, second
