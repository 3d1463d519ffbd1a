"""The words and tables of the study of accuracy over a."""

from typing import Any

# Table IV of the paper: accuracy in percent at alpha 0, 0.35, 0.6.
PAPER = {
    "GaoKao": {
        "Deepseek": (27.2, 27.7, 25.9),
        "Xverse": (47.2, 47.5, 45.9),
        "Qwen": (73.5, 74.1, 71.7),
    },
    "WiC": {
        "Deepseek": (50.7, 50.7, 50.4),
        "Xverse": (50.0, 50.2, 49.8),
        "Qwen": (60.5, 60.7, 60.1),
    },
    "triviaqa": {
        "Deepseek": (59.3, 59.0, 57.6),
        "Xverse": (53.1, 53.8, 52.4),
        "Qwen": (69.3, 69.0, 67.9),
    },
    "race": {
        "Deepseek": (70.0, 69.1, 68.6),
        "Xverse": (81.4, 80.9, 80.3),
        "Qwen": (80.0, 79.1, 79.6),
    },
    "gsm8k": {
        "Deepseek": (51.4, 50.2, 48.8),
        "Xverse": (62.9, 61.2, 58.6),
        "Qwen": (85.7, 85.3, 83.3),
    },
}
WHY = (
    "The paper's models have 16 to 57 B parameters and answer well above chance; where "
    "a model answers near chance, no fall can show. The paper's own differences below "
    "a = 0.35 lie within the interval of its 1,000 questions (about 3 points)."
)
LIMITS = (
    "The default model is tiny (16 M parameters): its accuracy near chance is expected "
    "and says nothing about substitution; the share of answers equal to the unmodified "
    "model's says more.",
    "Prompts are prefilled, where no route acts; substitution acts only on the few "
    "tokens of a choice. The text's tokens are all decoded.",
    "Intervals: Wilson for shares, bootstrap over blocks of 32 tokens for the "
    "perplexity ratio.",
    "Only questions short enough were asked; the sets stand in for the paper's.",
)


def overlaps(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two accuracies cannot be told apart by their 95 % intervals."""
    (low, high), (low2, high2) = one["interval95"], other["interval95"]
    return low <= high2 and low2 <= high


def verdict_of(rows: list[dict[str, Any]]) -> str:
    """What a set's accuracies over a say; the first row is a = 0."""
    first, differ = rows[0], [row for row in rows if not overlaps(row, rows[0])]
    low, high = first["interval95"]
    near = ", at chance" if low <= first["chance"] <= high else ""
    if differ:
        return f"differs from a = 0 from a = {differ[0]['a']:g} on{near}"
    return f"not informative{near}"


def tasks_of(accuracy) -> dict[str, list[dict[str, Any]]]:
    """Rows of each set, in order of a."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in accuracy:
        tasks.setdefault(row["task"], []).append(row)
    return tasks


def answer_of(accuracy, fidelity) -> str:
    """One sentence; says plainly what is not informative."""
    tasks = tasks_of(accuracy)
    *single, together = tasks.values()
    silent = sum(verdict_of(rows).startswith("not") for rows in single)
    first, last = together[0], together[-1]
    end = fidelity[-1]
    text = (
        f"{silent} of {len(single)} sets are not informative (95 % intervals overlap "
        f"with a = 0 at every a); over all {first['n']} questions accuracy is "
        f"{100 * first['accuracy']:.1f} % at a = 0 and "
        f"{100 * last['accuracy']:.1f} % at a = {last['a']:g} "
        f"(chance {100 * first['chance']:.1f} %): {verdict_of(together)}."
    )
    return text + (
        f" At a = {last['a']:g}, {100 * last['same_answer']:.1f} % of answers are the "
        f"unmodified model's; on text {100 * end['agreement']:.1f} % of tokens agree "
        f"and perplexity is x{end['perplexity_ratio']:.3f}."
    )


def table_of(accuracy, fidelity) -> str:
    """Markdown in the paper's form: a row a set, a column an a."""
    tasks = tasks_of(accuracy)
    columns = [row["a"] for row in fidelity]
    head = ["set", "n", "chance", *(f"{a:g}" for a in columns), "verdict"]
    lines = [
        "# Accuracy (%) over a, as in SMoE's table IV",
        "",
        "± is half of the 95 % interval (Wilson).",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    for task, rows in tasks.items():
        cells = [task, str(rows[0]["n"]), f"{100 * rows[0]['chance']:.1f}"]
        for row in rows:
            low, high = row["interval95"]
            cells.append(f"{100 * row['accuracy']:.1f} ± {50 * (high - low):.1f}")
        lines.append(f"| {' | '.join([*cells, verdict_of(rows)])} |")
    together = list(tasks.values())[-1]
    extra = (
        ("same answers", [100 * row["same_answer"] for row in together], ".1f"),
        ("agreement on text", [100 * row["agreement"] for row in fidelity], ".1f"),
        ("perplexity ratio", [row["perplexity_ratio"] for row in fidelity], ".4f"),
        ("substituted", [100 * row["changed_ratio"] for row in fidelity], ".1f"),
    )
    for name, values, form in extra:
        cells = [name, "", "", *(f"{value:{form}}" for value in values), ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
