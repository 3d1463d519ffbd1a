"""gin files are data here: what would run code is refused before gin reads it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from gin import config_parser

from moe_edge.core.checks import ConfigError


class _Nothing(config_parser.ParserDelegate):
    """Builds nothing: only the kinds of statements matter here."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return None

    def macro(self, macro_name):
        return None


def check_is_data(files: Iterable[str], bindings: Iterable[str]) -> None:
    """Raises ConfigError for an import in gin files, what they include, or bindings.

    Also for a file that cannot be read: gin would look for it among Python packages.
    """
    open_files: list[Path] = []
    for binding in bindings:
        _check_text(binding, "--gin_param", open_files)
    for file in files:
        _check_file(file, open_files)


def _check_file(name: str, open_files: list[Path]) -> None:
    path = Path(name).resolve()
    if path in open_files:
        raise ConfigError(f"gin file {name} includes itself; remove the include")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"gin file {name} cannot be read: {error.strerror}; check the path"
        ) from error
    _check_text(text, name, [*open_files, path])


def _check_text(text: str, where: str, open_files: list[Path]) -> None:
    for statement in _statements(text):
        if isinstance(statement, config_parser.ImportStatement):
            raise ConfigError(
                f"{where}:{statement.location.line_num}: import "
                f"{statement.module!r} would run code; a gin file holds settings "
                "only, so remove it"
            )
        if isinstance(statement, config_parser.IncludeStatement):
            _check_file(statement.filename, open_files)


def _statements(text: str) -> Iterator:
    return iter(config_parser.ConfigParser(text, _Nothing()))
