"""What is kept of prompts, found by beginning and K, and who leaves."""

from moe_edge.engine.prompt_cache import Kept, PromptCache

A, B = tuple(range(8)), (*range(4), 9, 9, 9, 9)


def cache_of(*entries, budget=100) -> PromptCache:
    cache = PromptCache(budget, chunk=4)
    for k, tokens in entries:
        assert cache.wants(tokens, k, 40)
        keep(cache, k, tokens)
    return cache


def keep(cache, k, tokens) -> None:
    cache.make_room(tokens, k, 40)
    cache.add(k, Kept(tokens, [], 40))


def test_find_gives_the_longest_beginning_in_whole_chunks_at_the_same_k():
    cache = cache_of((2, A), (2, B))
    kept, count = cache.find((*B, 5), 2)
    assert kept.tokens == B and count == 8
    assert cache.find((*range(6), 7, 7), 2)[1] == 4
    assert cache.find((*A, 5), 3) == (None, 0)
    assert cache.find((7, *A), 2) == (None, 0)


def test_find_leaves_the_last_token_to_run():
    assert cache_of((2, A)).find(A, 2)[1] == 4
    assert cache_of((2, A)).find(A[:4], 2) == (None, 0)


def test_least_recently_used_leaves_and_bytes_stay_within_the_budget():
    cache = cache_of((2, A), (2, B))
    cache.find((*A, 5), 2)
    assert cache.wants(A, 3, 40)
    keep(cache, 3, A)
    assert cache.num_bytes == 80 and len(cache) == 2
    assert cache.find((*B, 5), 2)[1] == 4 and cache.find((*A, 5), 2)[1] == 8


def test_wants_only_news_that_fit():
    cache = cache_of((2, A))
    assert not cache.wants(A[:4], 2, 20) and cache.wants(A[:4], 1, 20)
    assert not cache.wants((), 2, 0) and not cache.wants(B, 2, 101)


def test_longer_one_replaces_its_beginning_and_nobody_else():
    cache = cache_of((3, B), (2, A))  # no room for a third one
    keep(cache, 2, (*A, *A))
    assert len(cache) == 2 and cache.num_bytes == 80
    assert cache.count((*A, *A, 5), 2) == 16 and cache.count((*B, 5), 3) == 8


def test_question_makes_nothing_younger():
    cache = cache_of((2, A), (2, B))
    assert cache.count((*A, 5), 2) == 8
    keep(cache, 3, A)
    assert cache.count((*A, 5), 2) == 4 and cache.count((*B, 5), 2) == 8


def test_cleared_cache_holds_nothing():
    cache = cache_of((2, A), (2, B))
    cache.clear()
    assert len(cache) == cache.num_bytes == cache.count((*A, 5), 2) == 0
