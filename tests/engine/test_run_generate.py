import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.generate import (
    Generation,
    even_batches,
    generate_rows,
    shape_of,
    speed_of,
)
from moe_edge.engine.run_generate import collect_prompts
from moe_edge.model.sampling import Sampling
from tests.support.layered import layered, resident_of
from tests.support.tiny_models import GQA, random_prompts


def test_even_batches_holds_all_rows_in_nearly_equal_parts():
    assert even_batches(10, 8) == [range(0, 5), range(5, 10)]
    assert even_batches(3, 8) == [range(0, 3)]
    assert [len(batch) for batch in even_batches(17, 8)] == [5, 6, 6]


@pytest.mark.parametrize(
    "prompt, prompts, got", [(["x"], "f.jsonl", "both"), ([], None, "neither")]
)
def test_collect_prompts_rejects_both_or_neither(prompt, prompts, got):
    with pytest.raises(ConfigError, match=f"got {got}"):
        collect_prompts(prompt, prompts)


def test_collect_prompts_rejects_empty_prompt():
    with pytest.raises(RequestError, match="--prompt number 1 is empty"):
        collect_prompts(["x", ""], None)
    with pytest.raises(
        FileNotFoundError, match="--prompts no.jsonl does not exist; ch"
    ):
        collect_prompts([], "no.jsonl")


def test_speed_of_leaves_first_tokens_out():
    done = [
        Generation([[1, 2, 3], [4]], ttft_s=1.0, decode_s=0.5, steps=2),
        Generation([[5, 6]], ttft_s=3.0, decode_s=0.5, steps=1),
    ]
    assert speed_of(done) == {"tokens_per_s": 3.0, "ttft_s": 2.0}


def test_speed_of_single_tokens_is_zero():
    done = [Generation([[1]], ttft_s=1.0, decode_s=0.0, steps=0)]
    assert speed_of(done)["tokens_per_s"] == 0.0


def test_shape_of_equal_buckets_share_programs():
    assert shape_of([[1] * 20], 8) == shape_of([[1] * 23], 8)
    # The second chunk of 520 tokens is a program that 512 tokens do not need.
    assert shape_of([[1] * 512], 200) != shape_of([[1] * 520], 200)
    assert shape_of([[1] * 20], 8) != shape_of([[1] * 20] * 2, 8)


@pytest.mark.parametrize("wrong", [1.5, 0, True, "3"])
def test_generate_rows_counts_are_whole_numbers(wrong):
    message = "must be a positive whole number, got"
    with pytest.raises(ConfigError, match=f"max_new_tokens {message}"):
        generate_rows(None, [[1]], wrong, Sampling())
    with pytest.raises(ConfigError, match=f"batch_size {message}"):
        generate_rows(None, [[1]], 1, Sampling(), batch_size=wrong)


def test_generate_rows_batches_give_the_tokens_of_single_rows():
    engine = resident_of("gqa", np.float32)
    rows = random_prompts(GQA, [5, 9, 3])
    together, speed = generate_rows(engine, rows, 6, Sampling(), batch_size=2)
    alone = [generate_rows(engine, [row], 6, Sampling())[0][0] for row in rows]
    assert together == alone
    assert set(speed) == {"tokens_per_s", "ttft_s", "warm_up_s"}


def test_generate_rows_samples_do_not_repeat_from_batch_to_batch():
    engine = resident_of("gqa", np.float32)
    rows = [[1, 2, 3]] * 4
    sampling = Sampling(temperature=1.0)
    tokens, _ = generate_rows(engine, rows, 12, sampling, batch_size=2)
    assert len({tuple(row) for row in tokens}) == 4


@pytest.mark.parametrize("predictor", ["none", "moe_infinity"])
def test_offloaded_run_counts_from_empty_slots_and_from_one_moment(predictor):
    engine = layered("gqa", slots=24, predictor=predictor, with_trace=False)
    queue, asked = engine.queue, []
    request_all, restart = queue.request_all, engine.restart

    def noting(*args, **kwargs):
        transfers = request_all(*args, **kwargs)
        asked.extend(transfers)
        return transfers

    def restarting():
        restart()
        asked.clear()

    queue.request_all, engine.restart = noting, restarting
    rows = random_prompts(GQA, [9, 5, 12, 3])  # two batches of one shape
    for _ in range(2):  # an engine that has run before starts over as well
        generate_rows(engine, rows, 2, Sampling(), batch_size=2)
        engine.layer_step.drain()  # a prefetch may still be under way
        report = engine.report()
        # Every slot was empty: the prompts' experts had to come.
        assert report["prefill"]["misses"] > 8
        # float32 records of 1920 elements; a prefetch taken back has not moved.
        moved = sum(transfer.done for transfer in asked) * 1920 * 4
        assert report["bytes_moved"] == moved > 0
    engine.close()
