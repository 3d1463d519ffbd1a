"""What gin files and --gin_param may say, by what a command answers."""

import pytest

DRY = "--prompt", "a", "--dry_run"


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "\ngenerate.colr = 3",
            ":2: unknown parameter of generate: 'colr'; known: activ",
        ),
        (
            "generate:\n  top_kk = 3",
            ":2: unknown parameter of generate: 'top_kk'; did you mean 'top_k'? known:",
        ),
        (
            "offload.evction = 'lru'",
            ":1: unknown parameter of offload: 'evction'; did you mean 'eviction'? kno",
        ),
        (
            "generte.k = 3",
            ":1: unknown name 'generte'; did you mean 'generate'? known: cluster, ",
        ),
        ("prism_tabel1.seeds = 3", "'prism_tabel1'; did you mean 'prism_table1'?"),
        ("generate.config_text = 'x'", ":1: unknown parameter of generate: 'config_te"),
        (
            "generate.offload = @offlod()",
            ":1: unknown reference 'offlod'; did you mean 'offload'? known: offload,",
        ),
        ("generate.prompt = ['a', %HERE]", ":1: macro %HERE has no value; write `HERE"),
        ("generate.seed = %SEED", ":1: macro %SEED has no value; write `SEED = VALUE`"),
        ("fast/generate.k = 3", ":1: no reference has the scope 'fast', so this bind"),
        (
            "generate.k = 1\ngenerate.temperature = float('nan')",
            ":2: float is no value; expected a number, a text in quotes, ",
        ),
        ("\n\ngenerate.prompt = [a", ":3: a is no value; expected a number, "),
        ("generate.prompt = [", ":1: a bracket or a quote is not closed"),
        ("generate.k =", ":1: a value is missing or malformed; expected a number, "),
        ("generate.k", ":1: expected `name.parameter = value`"),
        ("generate.k = 1 2", ":1: expected newline"),
        ("generate:\n", ":2: expected indentation"),
        (f"generate.prompt = {'[' * 5000}", ":1: the value is nested too deeply"),
    ],
)
def test_gin_file_with_a_mistake_is_named_with_its_line(
    run_script, tmp_path, text, message
):
    (tmp_path / "run.gin").write_text(text)
    error = run_script("generate", "--gin_file", "run.gin", *DRY).error
    assert error.startswith("error: run.gin:")
    assert message in error


def test_gin_file_that_is_no_text_is_named(run_script, tmp_path):
    (tmp_path / "run.gin").write_bytes(b"generate.k = \xff")
    error = run_script("generate", "--gin_file", "run.gin", *DRY).error
    assert "gin file run.gin is not UTF-8 text: byte 13 is 0xff" in error


@pytest.mark.parametrize(
    "binding", ["quickstart.max_new_tokens = 8", "prism_table1.seeds = 2"]
)
def test_binding_of_another_command_is_refused_by_flag_and_skipped_in_files(
    run_script, tiny, tmp_path, binding
):
    name = binding.split(" = ")[0]
    flags = *DRY, "--checkpoint", tiny
    error = run_script("generate", *flags, "--gin_param", binding).error
    assert f"--gin_param:1: {name} means nothing to generate, which reads" in error
    assert "reads generate, offload; leave it out" in error
    (tmp_path / "run.gin").write_text(binding)
    assert run_script("generate", *flags, "--gin_file", "run.gin").summary["dry_run"]


def test_scope_of_a_reference_and_macros_with_a_value_are_accepted(run_script, tiny):
    bindings = (
        "fast/offload.eviction = 'lfu'",
        "generate.offload = @fast/offload()",
        "generate.k = %K",
        "K = 1",
        "generate.seed = %SEED",
    )
    flags = [flag for binding in bindings for flag in ("--gin_param", binding)]
    done = run_script("generate", *DRY, "--checkpoint", tiny, "--seed=1", *flags)
    assert done.summary["dry_run"]
