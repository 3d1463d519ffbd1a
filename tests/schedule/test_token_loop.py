"""What the steps of token serving compute, by hand."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.token_loop import NO_STEP, TokenJob, TokenLoop


def come(loop, *jobs):
    for job in jobs:
        loop.admit(job, loop.arrive(job, 0.0), 0.0)


def step(loop, finished=()):
    """One step: (id, start, stop) of its chunks, ids of the rows that decode."""
    loop.begin_step(0, 0.0)
    chunks, decode = loop.steps[0]
    loop.end_step(0, 0.0, finished)
    assert loop.steps[0] == NO_STEP
    return [(j.id, a, b) for j, a, b in chunks], [job.id for job in decode]


def test_prompts_are_cut_and_join_the_rows_that_decode():
    loop = TokenLoop(Continuous(3), prefill_chunk=4)
    come(loop, TokenJob(0, prompt_tokens=3, new_tokens=4))
    assert step(loop) == ([(0, 0, 3)], [])  # its first token comes with the prompt
    come(loop, TokenJob(1, prompt_tokens=9, new_tokens=1))
    assert step(loop) == ([(1, 0, 4)], [0])
    come(loop, TokenJob(2, prompt_tokens=2, new_tokens=2))
    assert step(loop) == ([(1, 4, 8)], [0])  # 2 waits for the prompts before it
    assert step(loop) == ([(1, 8, 9)], [0])
    assert step(loop) == ([(2, 0, 2)], [])  # 0 and 1 have all of their tokens
    assert step(loop) == ([], [2])
    assert step(loop) == ([], []) and loop.outcomes["finished"] == 3


def test_prompts_that_came_together_are_prefilled_together_or_each_alone():
    jobs = [TokenJob(i, prompt_tokens=n, new_tokens=3) for i, n in enumerate((2, 6))]
    together = TokenLoop(Continuous(2), prefill_chunk=4)
    come(together, *jobs)
    assert step(together) == ([(0, 0, 2), (1, 0, 4)], [])
    assert step(together) == ([(1, 4, 6)], [0])
    assert step(together) == ([], [0, 1])
    jobs = [TokenJob(i, prompt_tokens=n, new_tokens=3) for i, n in enumerate((2, 6))]
    alone = TokenLoop(Continuous(2), prefill_chunk=4, prefill_rows=1)
    come(alone, *jobs)
    assert step(alone) == ([(0, 0, 2)], [])
    assert step(alone) == ([(1, 0, 4)], [0])


def test_a_prompt_goes_on_after_what_a_cache_holds():
    loop = TokenLoop(Continuous(2), prefill_chunk=4)
    come(loop, TokenJob(0, prompt_tokens=9, new_tokens=1, fed=8))
    assert step(loop) == ([(0, 8, 9)], [])
    assert loop.outcomes["finished"] == 1


def test_a_text_that_ends_early_and_a_client_that_goes_away():
    loop = TokenLoop(Continuous(3), prefill_chunk=4)
    jobs = [TokenJob(i, prompt_tokens=4 * i + 1, new_tokens=9) for i in range(3)]
    come(loop, *jobs)
    step(loop)
    assert step(loop, finished=[jobs[0]])[1] == [0]
    loop.begin_step(0, 0.0)
    loop.cancel(2)  # its last chunk is being computed
    loop.end_step(0, 0.0)
    assert [job.id for job in loop.lanes[0].running] == [1]
    assert loop.outcomes["finished"] == loop.outcomes["cancelled"] == 1
    assert jobs[0].left == 7 and jobs[1].left == 7


def test_chunks_are_of_at_least_one_token():
    with pytest.raises(ConfigError, match="prefill_chunk must be a positive .*got 0"):
        TokenLoop(Continuous(), prefill_chunk=0)
    with pytest.raises(ConfigError, match="prefill_rows must be a positive .*got 0"):
        TokenLoop(Continuous(), prefill_rows=0)
