"""Flags from a root's signature and docstring, and what `--help` prints."""

import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Sequence

from absl import flags

COMMON = "moe_edge.commands.common"  # the module of flags that every script has
INDENT = 24  # column where the text of a flag begins
# Flags of the release before that are no more, and what to do: for one release.
GONE = {
    "transport": "servers have one transport; equal machines run one engine together "
    "with --coordinator of generate, evaluate and serve",
    "combine": "servers return a row for each token and expert",
    "delay_ms": "slow links with --link_mbps",
}


def define(root: Callable, taken: Collection[str] = ()) -> tuple[flags.FlagHolder, ...]:
    """Defines a flag for every parameter of a root that one can set.

    Flags take text, whole and other numbers, yes or no, and lists of text; gin alone
    sets the rest. The default of every flag is None: not given.

    Args:
      taken: names that are flags already.
    """
    texts = parameter_texts(root)
    defined = []
    for name, parameter in inspect.signature(root).parameters.items():
        define_flag = flag_kind(parameter.annotation)
        if name in taken or define_flag is None:
            continue
        text = texts.get(name, "").rstrip(".")
        if parameter.default not in (parameter.empty, None, ()):
            text += f" (default {parameter.default})"
        defined.append(define_flag(name, None, text.strip()))
    return tuple(defined)


def flag_kind(annotation) -> Callable | None:
    """What defines a flag of an annotated type; None: only gin can set it."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    for kind, define_flag in (
        (str, flags.DEFINE_string),
        (bool, flags.DEFINE_bool),
        (float, flags.DEFINE_float),
        (int, flags.DEFINE_integer),
        (Sequence[str], flags.DEFINE_multi_string),
    ):
        if kind in kinds:
            return define_flag
    return None


def parameter_texts(root: Callable) -> dict[str, str]:
    """What a docstring says of every parameter, in one line.

    In its `Args` section, or among the attributes of a dataclass whose fields are
    parameters (`core.run_folder.unpacked`).
    """
    sections = re.findall(
        r"^(?:Args|Attributes[^\n]*):\n(.*?)(?=^\S|\Z)",
        inspect.getdoc(root) or "",
        re.MULTILINE | re.DOTALL,
    )
    texts: dict[str, str] = {}
    for item in re.split(r"^  (?=\w)", "".join(sections), flags=re.M)[1:]:
        names, _, text = item.partition(":")
        for name in names.split(","):
            texts[name.strip()] = " ".join(text.split())
    return texts


def in_words(error: str) -> str:
    """absl's message about a flag, without the words of Python's conversions."""
    gone = re.match(r"Unknown command line flag '(\w+)'", error)
    if gone and gone[1] in GONE:
        return f"--{gone[1]} is no flag any more: {GONE[gone[1]]}"
    for words, expected in (
        (r"invalid literal for int\(\) .*", "expected a whole number"),
        (r"could not convert string to float.*", "expected a number"),
        (r"\('Non-boolean argument .*\)", "expected true or false"),
    ):
        error = re.sub(words, expected, error)
    return error


def help_text(document: str) -> str:
    """What a script does and all its flags, those of every script at the end.

    Args:
      document: of the script.
    """
    own, common = [], []
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        for flag in defined:
            if module == COMMON and flag.name not in ("data_dir", "k", "device_memory"):
                common.append(flag)
            elif not module.startswith(("absl", "jax", "orbax", "tensorflow", "etils")):
                own.append(flag)
    parts = [document.strip(), "", "flags of this script:", *map(_flag_text, own)]
    parts += ["", "flags of every script:", *map(_flag_text, common)]
    return "\n".join(parts)


def _flag_text(flag: flags.Flag) -> str:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    width = max(60, shutil.get_terminal_size((88, 24)).columns)
    text = re.sub(r";?\s*repeat this option to specify .*", "", flag.help)
    lines = textwrap.wrap(text, width - INDENT) or [""]
    head = f"  {name}".ljust(INDENT)
    if len(head) > INDENT:  # the name is long: its text begins on the next line
        return "\n".join([head, *(" " * INDENT + line for line in lines)])
    return "\n".join([head + lines[0], *(" " * INDENT + line for line in lines[1:])])
