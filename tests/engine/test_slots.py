"""Rows that join and leave a running batch get what they get alone."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError, RequestError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.model.sampling import Sampling
from tests.support.layered import StoreReader, layered
from tests.support.running import (
    GQA,
    SIZES,
    alone,
    engine_of,
    log_probs_of,
    numbers_of,
    resident,
    row,
    run,
    tokens_of,
)
from tests.support.slow_cases import slow_but
from tests.support.tiny_models import score_all

# Joins: one alone, one beside it (its prompt has three chunks), and others into the
# places of those that left.
ARRIVALS = [
    (0, row("a", 9, 14, k=3)),
    (2, row("b", 40, 9, k=1)),
    (4, row("c", 33, 12, k=1)),
    (5, row("d", 5, 6)),
    (6, row("e", 16, 20, k=3)),
]
CASES = [
    ("resident", "gqa"),
    ("layered", "mla"),
    ("waves", "gpt_oss"),
    ("fused", "gqa"),
]


@pytest.mark.parametrize(
    ("mode", "name"), slow_but([("layered", "mla"), ("fused", "gqa")], CASES)
)
def test_tokens_in_company_are_those_alone(mode, name):
    slots = RowSlots(engine_of(mode, name), **SIZES)
    got = tokens_of(run(slots, ARRIVALS, leave=[("a", 7)]))
    for _, each in ARRIVALS:
        most = 7 if each.id == "a" else each.max_new_tokens
        assert got[each.id] == alone(name, each)[:most]
    assert len({tuple(tokens) for tokens in got.values()}) == len(ARRIVALS)


def deterministic(mode="resident", name="gqa", **options) -> RowSlots:
    return RowSlots(engine_of(mode, name), **SIZES, deterministic=True, **options)


# Every cache layout (grouped, latent, one head) and every kind of engine.
EXACT = [
    ("resident", "gqa"),
    ("layered", "mla"),
    ("resident", "one_head"),
    ("fused", "gqa"),
]


@pytest.mark.parametrize(("mode", "name"), EXACT)
def test_deterministic_log_probabilities_have_the_bits_they_have_alone(mode, name):
    asked = {"top_logprobs": 3, "k": 2}
    rows = [row("a", 9, 8, **asked), row("b", 40, 8, **asked), row("c", 6, 8, **asked)]
    company = run(deterministic(mode, name), [*zip((0, 1, 3), rows, strict=True)])
    for each in rows:
        by_itself = run(deterministic(mode, name), [(0, each)])
        np.testing.assert_array_equal(
            log_probs_of(company)[each.id], log_probs_of(by_itself)[each.id]
        )
    values = log_probs_of(company)["b"]
    assert values.shape == (8, 4) and (values <= 0).all()
    np.testing.assert_array_equal(values[:, 0], values[:, 1])  # greedy: the likeliest


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_prompt_cache_changes_nothing_but_what_is_computed(
    is_deterministic, monkeypatch
):
    first = row("first", 40, 10, top_logprobs=2, k=2)
    # The same 32 tokens, then others; at another K nothing may be shared.
    prompt = first.prompt[:35] + (1, 2, 3, 4)
    again = [
        dataclasses.replace(first, id=id, prompt=prompt, max_new_tokens=8, k=k)
        for id, k in (("again", 2), ("other_k", 1))
    ]
    engine, found = resident("gqa"), []
    run_chunk, computed = engine.run_chunk, []

    def note(session, tokens_BS, valid_BS, *args):
        computed.append(int(valid_BS.sum()))
        return run_chunk(session, tokens_BS, valid_BS, *args)

    monkeypatch.setattr(engine, "run_chunk", note)
    for size in (0, 10**6):
        slots = RowSlots(
            engine,
            **SIZES,
            deterministic=is_deterministic,
            prompt_cache_bytes=size,
        )
        run(slots, [(0, first)])
        computed.clear()
        spared = [slots.cached_tokens(each.prompt, each.k) for each in again]
        assert spared == ([32, 0] if size else [0, 0])
        slots.admit(again)
        got = {}
        while slots.is_busy:
            for new in slots.step():
                got.setdefault(new.id, []).append(new)
        assert sum(computed) == 39 + 39 - (32 if size else 0)
        cached = [slots[each.id].cached for each in again]
        assert cached == ([32, 0] if size else [0, 0])
        for each in again:
            slots.release(each.id)
        assert slots.cache.num_bytes <= size and bool(len(slots.cache)) == bool(size)
        found.append(got)
    assert tokens_of(found[0]) == tokens_of(found[1])
    for id, values in log_probs_of(found[0]).items():
        others = log_probs_of(found[1])[id]
        if is_deterministic:
            np.testing.assert_array_equal(values, others)
        np.testing.assert_allclose(values, others, atol=1e-5)


def test_decoded_tokens_are_kept_unless_they_could_change_bits():
    first = row("first", 10, 30, k=2)
    for is_deterministic, kept in ((False, 32), (True, 0)):
        slots = RowSlots(
            resident("gqa"),
            **SIZES,
            deterministic=is_deterministic,
            prompt_cache_bytes=10**6,
        )
        tokens = tokens_of(run(slots, [(0, first)]))["first"]
        found = slots.cache.find((*first.prompt, *tokens), 2)[1]
        assert found == kept


def test_what_a_lossy_route_decoded_serves_no_prompt():
    """Prompts are computed without loss, whatever ran before them."""
    given = {"threshold": 0.9}
    options = OffloadOptions(device_memory="50%", route="drop", route_options=given)
    with make_offloaded(StoreReader(GQA), options) as engine:
        slots = RowSlots(engine, **SIZES, prompt_cache_bytes=10**6)
        for first, kept in ((row("a", 10, 30, k=2), 0), (row("b", 40, 20, k=2), 32)):
            tokens = tokens_of(run(slots, [(0, first)]))[first.id]
            assert slots.cached_tokens((*first.prompt, *tokens, 1), 2) == kept


@pytest.mark.parametrize("when", ["waiting", "prompt", "running"])
def test_cancelled_row_changes_no_other_and_its_slot_is_free(when):
    slots = RowSlots(resident("gqa"), **SIZES)
    stays, goes = row("b", 40, 9, k=1), row("c", 33, 12, k=1)
    slots.admit([stays])
    got = [new.token for _ in range(3) for new in slots.step()]
    slots.admit([goes])
    for _ in range({"waiting": 0, "prompt": 1, "running": 5}[when]):
        got += [new.token for new in slots.step() if new.id == "b"]
    slots.release("c")
    assert slots.num_rows == 1 and not slots.has_prompts
    slots.admit([row("d", 5, 6)])  # into the place at once
    last = []
    while slots.is_busy:
        for new in slots.step():
            (got if new.id == "b" else last).append(new.token)
    assert got == alone("gqa", stays)
    assert last == alone("gqa", row("d", 5, 6))


def test_slots_write_a_copy_of_the_row_that_they_are_given():
    given = row("a", 9, 4)
    slots = RowSlots(engine_of("resident", "gqa"), **SIZES)
    first, again = (tokens_of(run(slots, [(0, given)])) for _ in range(2))
    assert first == again and len(first["a"]) == 4
    assert (given.tokens, given.length, given.k) == ([*given.prompt], 0, None)


def test_idle_rows_do_not_advance():
    slots = RowSlots(resident("gqa"), **SIZES)
    slots.admit([row("a", 9, 2, k=3), row("b", 40, 9, k=1)])
    for _ in range(9):
        slots.step()
    session = slots._batch.session
    assert slots["b"].length == 40 + 5
    assert session.lengths == [9 + 1, 40 + 5 + 1]  # the next step has begun
    np.testing.assert_array_equal(session.positions_B, session.lengths)


def test_cleared_slots_begin_anew():
    slots = RowSlots(resident("gqa"), **SIZES)
    slots.admit([row("a", 9, 14, k=3), row("c", 33, 12, k=1)])
    for _ in range(3):
        slots.step()
    slots.clear()
    assert slots.num_rows == 0 and not slots.is_busy and slots.kv_bytes == 0
    again = row("b", 40, 9, k=1)
    assert tokens_of(run(slots, [(0, again)]))["b"] == alone("gqa", again)
    rows = [row("a", 9, 14, k=3), row("c", 33, 12, k=1)]
    slots.admit(rows)
    for _ in range(5):
        slots.step()
    each = [slots.row_bytes(row.need) for row in rows]
    assert slots.together_bytes(each) == slots.kv_bytes == sum(each)
    assert slots.together_bytes([]) == 0


def test_row_goes_on_at_another_k():
    engine = resident("gqa")
    asked = {"top_logprobs": 0, "k": 3}
    steady, changing = row("steady", 9, 6, **asked), row("changing", 9, 6, **asked)
    slots = RowSlots(engine, **SIZES, prompt_cache_bytes=10**6)
    slots.admit([steady, changing])
    got = {"steady": [], "changing": []}
    while slots.is_busy:
        for new in slots.step():
            got[new.id].append(new.score.logprob)
        if len(got["changing"]) == 3:
            slots.set_k("changing", 1)
    assert got["steady"][:3] == pytest.approx(got["changing"][:3], abs=1e-5)
    assert got["steady"][3] != pytest.approx(got["changing"][3], abs=1e-5)
    assert slots["changing"].k == 1 and slots["changing"].same_k == 9 + 2


def test_prompt_scores_are_those_of_the_whole_prompt():
    engine = resident("gqa")
    asked = {"top_logprobs": 2, "score_prompt": True}
    rows = [row("a", 40, 1, **asked), row("b", 9, 1, **asked)]
    slots = RowSlots(engine, **SIZES, prompt_cache_bytes=10**6)
    for _ in range(2):  # the second time nothing comes from the prompt cache
        slots.admit(rows)
        while slots.is_busy:
            slots.step()
        for each in rows:
            (logits_SV,) = score_all(engine, [each.prompt])
            log_SV = np.array(jax.nn.log_softmax(logits_SV))[:-1]
            got = numbers_of(slots[each.id].prompt_scores)
            own_S = log_SV[np.arange(len(log_SV)), each.prompt[1:]]
            np.testing.assert_allclose(got[:, 0], own_S, atol=1e-5)
            top_SN = -np.sort(-log_SV)[:, :2]
            np.testing.assert_allclose(got[:, 1:], top_SN, atol=1e-5)
            slots.release(each.id)


def test_draws_depend_on_seed_and_step_alone():
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    rows = [row(id, 9, 12, k=2, sampling=sampling) for id in ("a", "b")]
    slots = deterministic()
    company = tokens_of(run(slots, [(0, rows[0]), (3, rows[1]), (1, row("c", 5, 6))]))
    assert company["a"] == company["b"] == tokens_of(run(slots, [(0, rows[0])]))["a"]
    assert company["c"] == tokens_of(run(slots, [(0, row("c", 5, 6))]))["c"]  # greedy
    other = row("a", 9, 12, k=2, sampling=Sampling(temperature=1.0, top_p=0.9, seed=6))
    assert tokens_of(run(slots, [(0, other)]))["a"] != company["a"]


def test_bad_rows_are_refused():
    slots = deterministic()
    for bad, kind, message in (
        (row("x", 5, 60), CapacityError, "'x': 5 tokens and 60 new ones .* 64"),
        (row("x", 5, 5, k=4), RequestError, r"'x': K must be 1..3 .* got 4"),
        (row("x", 5, 5, k=0), RequestError, "got 0"),
        (row("x", 5, 5, top_logprobs=21), RequestError, "must be 0..20, got 21"),
        (row("x", 5, 5, score_prompt=True), RequestError, "without top_logprobs"),
        (row("x", 5, 0), ConfigError, "max_new_tokens .* got 0"),
    ):
        with pytest.raises(kind, match=message):
            slots.admit([bad])
    slots.admit([row("x", 5, 5)])
    with pytest.raises(RequestError, match="two rows have one id"):
        slots.admit([row("x", 5, 5)])
    with pytest.raises(RequestError, match="got 9"):
        slots.set_k("x", 9)
    with pytest.raises(CapacityError, match="2 rows for 1 free of 2 slots"):
        slots.admit([row("y", 5, 5), row("z", 5, 5)])


def test_bad_sizes_and_engines_of_one_sequence_are_refused():
    sizes = SIZES | {"max_context": 9999}
    with pytest.raises(CapacityError, match="9999 tokens .* context of 2048"):
        RowSlots(resident("gqa"), **sizes)
    with pytest.raises(ConfigError, match="prompt_rows .* got 0"):
        RowSlots(resident("gqa"), **SIZES | {"prompt_rows": 0})
    with pytest.raises(ConfigError, match="prompt_cache_bytes .* got -1"):
        RowSlots(resident("gqa"), **SIZES, prompt_cache_bytes=-1)
    small = ResidentEngine(resident("gqa").weights)
    small.kv_limit_bytes = 10_000
    # Two rows, a layer of them a second time, and of one row.
    with pytest.raises(CapacityError, match=r"2 rows \(110592 bytes\).*10000 bytes"):
        RowSlots(small, **SIZES)
    with layered() as traced, pytest.raises(ConfigError, match="a trace follows one"):
        RowSlots(traced, **SIZES)
    for mode in ("layered", "fused"):
        options = OffloadOptions(
            device_memory="50%", mode=mode, eviction="static_prompt"
        )
        with make_offloaded(StoreReader(GQA), options) as engine:
            with pytest.raises(
                ConfigError, match="eviction policy static_prompt follows one"
            ):
                RowSlots(engine, **SIZES)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"assist": "fiddler"}, "experts computed elsewhere"),
        ({"route": "drop"}, "route drop"),
        ({"route": "drop", "mode": "fused"}, "route drop"),
    ],
)
def test_deterministic_is_refused_where_company_matters(options, reason):
    options = OffloadOptions(device_memory="50%", **options)
    with make_offloaded(StoreReader(GQA), options) as engine:
        RowSlots(engine, **SIZES)
        with pytest.raises(ConfigError, match=f"deterministic rows and {reason}"):
            RowSlots(engine, **SIZES, deterministic=True)


def test_rows_over_one_engine_share_programs():
    engine = resident("gqa")
    first, second = (RowSlots(engine, **SIZES) for _ in range(2))
    run(first, [(0, row("a", 9, 3))])
    compiled = second.num_compiled()
    run(second, [(0, row("a", 9, 3))])
    assert second.num_compiled() == compiled
    point = RowSlots(engine.at_k(2), **SIZES)
    assert point._programs is first._programs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_fed_and_scored_as_a_prompt_is(temperature):
    sampling = Sampling(temperature=temperature, seed=3)
    asked = {"top_logprobs": 2, "k": 2, "sampling": sampling}
    whole = row("whole", 20, 6, score_prompt=True, **asked)
    forced = dataclasses.replace(
        whole,
        id="forced",
        prompt=whole.prompt[:1],
        forced=whole.prompt[1:],
        score_prompt=False,
    )
    slots = RowSlots(resident("gqa"), **SIZES)
    slots.admit([whole, forced])
    got = {"whole": [], "forced": []}
    while slots.is_busy:
        for new in slots.step():
            got[new.id].append(new)
    fed, drawn = got["forced"][:19], got["forced"][19:]
    assert tuple(new.token for new in fed) == forced.forced
    assert [new.is_forced for new in got["forced"]] == [True] * 19 + [False] * 6
    assert [new.token for new in drawn] == [new.token for new in got["whole"]]
    scores = [new.score for new in fed], slots["whole"].prompt_scores
    np.testing.assert_allclose(*map(numbers_of, scores), atol=1e-5)
    assert forced.need == whole.need == 26


def test_bad_forced_tokens_are_refused():
    slots = RowSlots(resident("gqa"), **SIZES)
    bad = dataclasses.replace(row("x", 5, 5), forced=(61,))
    with pytest.raises(RequestError, match=r"token id 61, expected 0\.\.60"):
        slots.admit([bad])
    with pytest.raises(CapacityError, match="'x': 60 tokens and 5 new ones .* 64"):
        slots.admit([dataclasses.replace(bad, forced=(1,) * 55)])
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        slots.admit([dataclasses.replace(bad, prompt=(), forced=(1, 2))])
