"""Pages of results: tables, the paper's claim, cuts."""

from moe_edge.metrics.report import check_lines, entry_readme, shortened
from moe_edge.metrics.results import metric
from moe_edge.metrics.tables import all_tables, tables_of


def rows(policies, names, unit="ms"):
    return [
        metric(policy, name, 10 * p + n, unit, 3, ("half range", 0.5))
        for p, policy in enumerate(policies)
        for n, name in enumerate(names)
    ]


def test_a_measure_is_one_table_of_what_ran_over_settings():
    text = tables_of(rows(("lru", "lfu"), ("time, batch 1", "time, batch 3")), 50)
    assert text == [
        "**time** (ms; ± half range; n = 3)",
        "",
        "| what ran | batch 1 | batch 3 |",
        "| --- | --- | --- |",
        "| lru | 0 ± 0.5 | 1 ± 0.5 |",
        "| lfu | 10 ± 0.5 | 11 ± 0.5 |",
        "",
    ]


def test_small_measures_stand_side_by_side_with_their_units():
    metrics = [*rows(("a", "b"), ("time",)), *rows(("a", "b"), ("moved",), "bytes")]
    (table,) = all_tables(metrics)
    assert table.columns == ["time (ms)", "moved (MB)"] and table.rows == ["a", "b"]


def test_measures_of_one_row_are_stacked_over_the_same_settings():
    settings = ("25%, batch 1", "50%, batch 1", "25%, batch 3", "50%, batch 3")
    metrics = rows(("smoe",), [f"agreement, {s}" for s in settings], "1")
    metrics += rows(("smoe",), [f"loss, {s}" for s in settings[:3]], "nats")
    (table,) = all_tables(metrics)
    assert table.rows == ["agreement, smoe", "loss, smoe (nats)"]
    assert table.columns == list(settings)


def test_a_remark_on_a_setting_makes_no_second_row():
    metrics = rows(("original",), [f"loss, K={4 * k} (K'={k})" for k in range(1, 10)])
    metrics += rows(("LG",), [f"loss, K={k}" for k in range(1, 37)])
    (table,) = all_tables(metrics)
    assert len(table.rows) == 36 and ("K=4", "original") in table.cells
    metrics = rows(("LG",), ["sum |M|, K=1 (half)", "sum |M|, K=2"])
    text = "\n".join(tables_of(metrics, 20))
    assert "| K=1 (half) |" in text and "**sum |M|**" in text


def test_bars_in_labels_do_not_end_a_cell():
    text = tables_of(
        [
            metric("ours", "size", 1.0, "sum |M|", 1),
            metric("ours", "loss", 1.0, "1", 1),
        ],
        20,
    )
    assert "| what ran | size (sum \\|M\\|) | loss |" in text


def test_many_settings_of_one_policy_are_laid_out_in_two_directions():
    names = [f"time, {m}, {s} remote" for m in ("x", "y") for s in range(5)]
    (table,) = all_tables(rows(("all",), names))
    assert table.rows == ["x", "y"]
    assert table.columns == [f"{s} remote" for s in range(5)]


def test_a_server_in_settings_of_its_own_is_part_of_the_measure():
    names = ("time, K=1", "time, server 1, K=1", "time, server 2")
    titles = {table.title for table in all_tables(rows(("a", "b"), names))}
    columns = [
        c for table in all_tables(rows(("a", "b"), names)) for c in table.columns
    ]
    assert titles == {""} and columns == [
        *("time, K=1 (ms)", "time, server 2 (ms)", "time, server 1, K=1 (ms)"),
    ]


def test_a_long_table_keeps_the_extreme_rows_and_says_so():
    metrics = [metric("a", f"time, K={k}", abs(k - 20), "ms") for k in range(40)]
    metrics += [metric("b", f"time, K={k}", -k, "ms") for k in range(40)]
    text = "\n".join(tables_of(metrics, 15))
    assert "10 of 40 rows; all: `result.json`" in text
    assert all(f"| K={k} |" in text for k in (0, 20, 39)) and "| K=30 |" not in text
    text = "\n".join(tables_of(metrics, 15, "At K=30 it falls, not at K=255."))
    assert all(f"| K={k} |" in text for k in (0, 20, 30, 39))
    assert "| K=25 |" not in text
    # Of more names than rows the least and largest stay; LG is not named by LG-FT.
    names = [*(f"p{n}" for n in range(8)), "LG", "LG-FT"]
    metrics = [metric(name, "time", n, "ms") for n, name in enumerate(names)]
    metrics += [metric(name, "loss", 1.0, "nats") for name in names]
    named = ", ".join(names[1:8]) + ", LG-FT"
    (table,) = all_tables(metrics)
    assert table.telling(7, named) == [*names[1:7], "LG-FT"]


def test_lines_that_are_left_go_to_the_first_tables():
    metrics = rows([f"p{n}" for n in range(9)], ("time, a", "time, b", "time, c"))
    metrics += rows([f"q{n}" for n in range(9)], ("loss, a", "loss, b", "loss, c"))
    for more in range(3):
        text = tables_of(metrics, 2 * (5 + 6) + more)
        first = next(n for n, line in enumerate(text) if line.startswith("**loss"))
        of_each = [sum("| p" in t for t in text[:first]), sum("| q" in t for t in text)]
        assert of_each == ([6, 6], [7, 6], [7, 7])[more]


def test_tables_without_room_are_named():
    metrics = rows([f"p{n}" for n in range(9)], ("time, a", "time, b", "time, c"))
    metrics += rows([f"q{n}" for n in range(9)], ("loss, a", "loss, b", "loss, c"))
    text = tables_of(metrics, 12)
    assert text[-2:] == ["Also in `result.json`: loss.", ""]


def test_a_benchmark_shows_ours_next_to_the_peer():
    metrics = [
        metric("ours", "decode/batch1", 600.0, "tokens/s"),
        metric("torch", "decode/batch1", 300.0, "tokens/s"),
        metric("ours / peer", "decode/batch1", 2.0, "1", 3, ("half range", 0.1)),
        metric("ours", "gap/uniform 3 equal", 70.0, "%"),
        metric("ours", "gap/prism 3 equal", 3.0, "%"),
    ]
    first, second = all_tables(metrics)
    assert first.columns == ["ours", "torch", "ours / peer"]
    assert first.rows == ["decode/batch1 (tokens/s)"]
    assert second.title == "gap" and second.rows == ["uniform", "prism"]


def test_failed_checks_come_first():
    assert check_lines({"a": True, "b": False, "c": True})[2:4] == [
        "- NOT so: b.",
        "- Yes: a; c.",
    ]
    assert check_lines({}) == []


def test_long_texts_are_cut_to_words():
    assert shortened("a b c", 3) == "a b c"
    assert shortened("a b c d", 3) == "a b c ... (all of it: `result.json`)"


def test_a_page_of_a_huge_entry_fits_two_screens(tmp_path):
    names = [
        f"measure {m}, K={k}, batch {b}"
        for m in range(9)
        for k in range(30)
        for b in (1, 3)
    ]
    result = {
        "question": "What?",
        "answer": "That.",
        "details": ["More."],
        "metrics": rows([f"p{n}" for n in range(4)], names),
        "checks": {"it ran": True},
        "command": "python x.py",
        "limits": ["Small."],
        "kind": "measured",
        "model": {"name": "m", "weights": "random"},
        "machine": {
            "gpu": None,
            "cpu": "c",
            "cores": 2,
            "ram_bytes": None,
            "python": "3",
            "jax": "0",
            "backend": "cpu",
        },
        "git": {"commit": None, "dirty": None},
        "started_utc": "now",
        "wall_s": 1.0,
    }
    page = entry_readme(result)
    assert len(page.splitlines()) <= 100
    order = [
        "# What?",
        "**That.**",
        "- More.",
        "plot.png",
        "measure 0",
        "it ran",
        "python x.py",
        "Small.",
    ]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
