"""Main, shadow and workers together, on sockets: gate A, recall, losses."""

import numpy as np
import pytest

from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.core.checks import ConfigError
from moe_edge.papers.od_moe.shadow.follower import Follower
from moe_edge.papers.od_moe.shadow.recall import recall, recall_by_index
from moe_edge.workload.cluster_run_reader import read_requests
from tests.support.slow_cases import slow


def check(run, row):
    """What holds in every run."""
    assert run.tokens == run.wanted and row["same_tokens"]
    assert row["lost_requests"] == 0
    homes = read_requests(run.folder / "requests_od_moe.csv")
    assert {one.server for one in homes} == set(run.servers) == {0}  # the main node
    stored = run.predictions()
    actual, predicted = stored["actual_NLK"], stored["predicted_NLK"]
    steps = sum(len(tokens) - 1 for tokens in run.tokens)
    assert actual.shape == predicted.shape == (steps, 2, 2)
    assert stored["request"].shape == stored["index"].shape == (steps,)
    for request, tokens in enumerate(run.tokens):
        mine = stored["index"][stored["request"] == request]
        np.testing.assert_array_equal(mine, np.arange(1, len(tokens)))
    assert (actual >= 0).all() and row["recall"] == recall(actual, predicted)
    by_index = recall_by_index(stored["index"], actual, predicted)
    np.testing.assert_allclose(row["recall_by_index"], by_index, atol=5e-5)  # rounded
    return stored


@pytest.mark.parametrize("departure", [*slow("late"), "speculative"])
@pytest.mark.parametrize("shadow", ["full", "int8", "random", "none"])
def test_tokens_are_the_models_whatever_is_predicted(live, shadow, departure):
    with live(shadow=shadow, departure=departure) as run:
        row = run.run()
        stored = check(run, row)
    if shadow == "full":
        assert row["recall"] == 1.0
    elif shadow == "none":
        assert row["recall"] == 0.0 and (stored["predicted_NLK"] == -1).all()
    elif shadow == "random":
        assert 0.0 < row["recall"] < 0.7  # .25 by chance
        assert (stored["predicted_NLK"] >= 0).all()
    else:
        assert 0.5 < row["recall"] <= 1.0
    assert row["compiled_after_warmup"] == 0


@pytest.mark.parametrize("departure", ["late", *slow("speculative")])
@pytest.mark.parametrize("token, kv", [*slow((1, 2), (0, 0)), (3, 2)])
def test_periods_change_predictions_but_never_tokens(live, departure, token, kv):
    periods = {"token_period": token, "kv_period": kv}
    with live(shadow="int8", departure=departure, **periods) as run:
        row = run.run()
        check(run, row)
    assert row["compiled_after_warmup"] == 0


def test_shares_of_many_workers_and_one_group(live):
    with live(shadow="full", workers=4, groups=1) as run:
        row = run.run()
        check(run, row)
        assert row["recall"] == 1.0
        assert sorted(row["device_bytes"]) == [
            *("main", "shadow", "worker0", "worker1", "worker2", "worker3")
        ]


@pytest.mark.slow
def test_shadow_with_other_tokens_starts_over_and_only_then(live):
    counts = {}
    for shadow in ("full", "nf4"):
        with live(shadow=shadow, departure="speculative", max_new_tokens=24) as run:
            row = run.run()
            check(run, row)
            counts[shadow] = row["restarts"]
    assert counts["full"] == 0 < counts["nf4"]


def test_what_the_shadow_says_last_of_a_step_counts_however_late(live, monkeypatch):
    """It guesses every token wrong: all it says in time is wrong, the rest is right."""
    own_tokens = Follower.own_tokens
    monkeypatch.setattr(Follower, "own_tokens", lambda self: 255 - own_tokens(self))
    with live(shadow="full", departure="speculative", max_new_tokens=24) as run:
        row = run.run()
        check(run, row)
    assert row["restarts"] >= 3 * 22 - 2 and row["recall"] == 1.0


@pytest.mark.parametrize("who", ["worker1", *slow("shadow")])
def test_lost_helper_costs_no_token(live, who):
    drill = f"kill:{who}@9"
    with live(shadow="full", workers=4, drill=drill, max_new_tokens=48) as run:
        row = run.run()
        check(run, row)
    (failure,) = row["failures"]
    assert failure["kind"] == "dead" and failure["resumed_s"] is not None
    assert failure["server"] == {"worker1": 3, "shadow": 1}[who]
    if who == "shadow":  # what it had said before still counts
        assert 0.0 < row["recall"] < 1.0
        assert row["device_bytes"]["shadow"] is None
    else:
        assert row["recall"] == 1.0 and row["reloads"] > 0


@pytest.mark.parametrize("who", ["main", *slow("shadow", "worker0")])
def test_who_calls_all_others_hung_evicts_nobody(live, who):
    drill = f"accuse:{who}@9"
    with live(shadow="full", drill=drill, max_new_tokens=24) as run:
        row = run.run()
        check(run, row)
    assert not row["failures"] and not row["bad_pairs"] and row["recall"] == 1.0


def run_and_break(live, pairs, for_good):
    """The row of a run in which connections break after some tokens."""
    with live(shadow="full", drill="kill:main@9", max_new_tokens=24) as run:

        def strike(drill):
            for by, who in pairs:
                run.nodes[by].lose_way_to(run.nodes[who].transport.peer, for_good)

        run.scheduler.strike = strike
        row = run.run()
        check(run, row)
        return row


@pytest.mark.parametrize(
    "whom", [["worker0", "worker1"], *slow(["worker1"], ["shadow"])]
)
def test_connections_of_the_main_node_that_break_once_are_made_again(live, whom):
    """Also where it reaches nobody for a while."""
    row = run_and_break(live, [("main", who) for who in whom], for_good=False)
    assert not row["failures"] and not row["bad_pairs"]


@pytest.mark.parametrize(
    "by, who, lost",
    [
        ("main", "worker1", [3]),
        *slow(
            ("main", "shadow", [1]),
            ("shadow", "main", [1]),
            ("shadow", "worker1", []),
            ("worker1", "main", []),  # it answers only
        ),
    ],
)
def test_helper_that_the_main_node_cannot_reach_leaves(live, by, who, lost):
    row = run_and_break(live, [(by, who)], for_good=True)
    assert [failure["server"] for failure in row["failures"]] == lost
    numbers = {"main": 0, "shadow": 1, "worker1": 3}
    assert row["bad_pairs"] == [[numbers[by], numbers[who]]]


def test_group_that_is_lost_as_a_whole_is_replaced_by_the_others(live):
    with live(shadow="full", drill="kill:worker0@9", max_new_tokens=48) as run:
        row = run.run()
        check(run, row)
    assert len(row["failures"]) == 1 and row["recall"] == 1.0


def test_run_without_workers_ends_with_code_3(live):
    options = {"workers": 1, "groups": 1, "max_new_tokens": 48}
    with live(shadow="full", drill="kill:worker0@9", **options) as run:
        with pytest.raises(NobodyLeft, match="all workers are lost") as error:
            run.run()
        assert error.value.exit_code == 3


@pytest.mark.parametrize("who", ["main", "worker1"])
def test_loss_while_all_warm_up_ends_the_run_with_code_3(live, who):
    with live() as run:
        tell_all = run.scheduler.tell_all

        def tell_and_kill(name, *more):
            tell_all(name, *more)
            if name == "warm":
                run.kill(who)

        run.scheduler.tell_all = tell_and_kill
        number = {"main": 0, "worker1": 3}[who]
        # Hung, where this process stood still while the connection closed.
        text = f"server {number} is (dead|hung) before all have begun"
        with pytest.raises(NobodyLeft, match=text) as error:
            run.run()
        assert error.value.exit_code == 3


def test_balanced_link_needs_steps_to_go_by(live):
    with live(load_bytes_per_s="balanced", max_new_tokens=1) as run:
        with pytest.raises(ConfigError, match="balanced .* 2 or more --max_new_tokens"):
            run.run()


def test_one_token_each_is_no_decode_step(live):
    with live(max_new_tokens=1) as run:
        row = run.run()
        assert run.tokens == run.wanted
        assert run.predictions()["actual_NLK"].shape == (0, 2, 2)
    assert row["recall"] is row["t_maxload_s"] is row["modelled_tokens_per_s"] is None


def test_load_that_lasts_as_long_as_it_may(live):
    with live(load_bytes_per_s="balanced") as run:
        row = run.run()
        check(run, row)
        # A call may take as long as it takes one worker to load a whole layer.
        layer_s = 8 * row["device_bytes"]["worker0"] / 4 / row["load_bytes_per_s"]
        longest_s = run.nodes["main"].node.engine.remote.deadline_s
        assert longest_s == pytest.approx(30.0 + layer_s)
    assert row["t_maxload_s"] == pytest.approx(
        2 * (row["t_main_s"] + row["t_message_s"]) + row["t_worker_s"]
    )
    assert row["load_bytes_per_s"] * row["t_maxload_s"] == pytest.approx(
        row["device_bytes"]["worker0"] / 2  # slots of two layers: a load is of one
    )
    assert row["t_load_s"] >= 0.99 * row["t_maxload_s"]
    resident_s = 2 * (row["t_main_s"] + row["t_message_s"] + row["t_worker_s"])
    assert 0.2 / resident_s < row["modelled_tokens_per_s"] <= 1 / resident_s


def by_pass(row) -> list[tuple[str, int, str]]:
    return [(each["pass"], each["server"], each["kind"]) for each in row["failures"]]


def before(run, name: str, acts) -> None:
    """Has acts done, in order, each time before all are told something."""
    tell_all, left = run.scheduler.tell_all, iter(acts)

    def act_and_tell(told, *more):
        if told == name:
            next(left)()
        tell_all(told, *more)

    run.scheduler.tell_all = act_and_tell


def nothing() -> None:
    pass


@pytest.mark.parametrize("name", ["resident", "od_moe"])
@pytest.mark.parametrize("who", ["main", "worker0"])
def test_loss_after_the_last_token_of_whom_all_counts_go_by_ends_the_run(
    live, who, name
):
    options = {"workers": 1, "groups": 1, "load_bytes_per_s": "balanced"}
    with live(**options) as run:
        acts = [lambda: run.kill(who)]
        before(run, "finish", acts if name == "resident" else [nothing, *acts])
        text = {"main": "main node", "worker0": "worker"}[who]
        line = f"^no {text} gave notes of the {name} pass, expected within 120 s"
        with pytest.raises(NobodyLeft, match=line) as error:
            run.run()
        assert error.value.exit_code == 3


def test_main_node_that_gives_no_notes_in_time_ends_the_run(live):
    with live() as run:
        ask = run.scheduler.ask
        run.scheduler.ask = lambda server, *more: ask(server, *more) if server else None
        with pytest.raises(NobodyLeft, match="no main node gave notes of the resident"):
            run.run()


@pytest.mark.slow
def test_losses_of_the_first_pass_and_after_the_last_token_are_written(live):
    with live(shadow="full", workers=4, max_new_tokens=48) as run:
        tell, killed = run.scheduler.tell, []

        def tell_and_kill(server, name, *more):
            tell(server, name, *more)
            if name == "request" and not killed:
                killed.append("worker1")
                run.kill("worker1")

        run.scheduler.tell = tell_and_kill
        before(run, "finish", [nothing, lambda: run.kill("shadow")])
        row = run.run()
        check(run, row)
    assert by_pass(row) == [("resident", 3, "dead"), ("od_moe", 1, "dead")]
    assert row["failures"][1]["detected_s"] > 0.0
