"""What an interrupted conversion leaves, so that the same command goes on with it.

`.NAME.converting` stands next to the destination NAME:

  facts.json   the source and the settings; another command is refused
  made/        the folder that becomes NAME; the manifest of ours is written last
  done/        of each item (a layer, the top) that is complete its hashes, as JSON

It outlives SIGINT, a kill and a full disk, as the kernel has what the process wrote.
After a power failure `moe-edge convert --verify` tells whether the disk has it, too.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_edge.checkpoint.schema import Item
from moe_edge.core.checks import MoeEdgeError, OutputError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import read_json
from moe_edge.core.progress import say

FACTS, MADE, DONE = "facts.json", "made", "done"


class Unfinished:
    """The work folder of one conversion.

    Attributes:
      made: the folder under construction.
    """

    def __init__(self, path: Path):
        """Use through `unfinished_work`."""
        self.path, self.made = path, path / MADE
        self._done = path / DONE

    @property
    def has_items(self) -> bool:
        """Whether anything is complete; nothing is once `made` has been moved away."""
        return self.made.is_dir() and any(self._done.glob("*.json"))

    def done(self, items: Iterable[Item]) -> dict[Item, dict[str, Any]]:
        """What `note` was given of those items that are complete."""
        return {
            item: self._read(path)
            for item in items
            if (path := self._done / f"{item}.json").is_file()
        }

    def note(self, item: Item, facts: dict[str, Any]) -> None:
        """Says that all files of an item are written."""
        write_text(self._done / f"{item}.json", json.dumps(facts))

    def check(self, facts: dict[str, Any]) -> None:
        """Raises OutputError if it is of other facts, or says nothing that is JSON."""
        stored = self._read(self.path / FACTS)
        changed = [
            f"{key} {json.dumps(was)}, now {json.dumps(now)}"
            for key, now in facts.items()
            if (was := stored.get(key)) != now
        ]
        if changed:
            raise OutputError(
                f"{self.path} holds an unfinished conversion with {'; '.join(changed)}:"
                " give that command again, or remove the folder"
            )
        for path in sorted(self._done.glob("*.json")):
            self._read(path)

    def _read(self, path: Path) -> dict[str, Any]:
        anew = f"remove {self.path}, and the conversion begins anew"
        found = read_json(path, lambda fault: OutputError(f"{fault}; {anew}"))
        if not isinstance(found, dict):
            raise OutputError(f"{path} holds no object; {anew}")
        return found

    def remove(self) -> None:
        """Removes all of it. `done` goes first: if this is cut off, nothing says that
        items are complete whose files are gone."""
        for path in (self._done, self.path):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def unfinished_work(out_dir: Path, facts: dict[str, Any]) -> Iterator[Unfinished]:
    """The work folder of a conversion, new or as an earlier run of it left it.

    The caller holds the lock of `out_dir`, and moves `made` away when it is complete.
    The folder stays after an interruption, and goes if the source is refused.

    Args:
      facts: what the result depends on, by name: values that JSON keeps as they are.
    Raises:
      OutputError: a folder of other facts, or with a damaged file.
    """
    work = Unfinished(out_dir.with_name(f".{out_dir.name}.converting"))
    if work.has_items:
        work.check(facts)
        say(f"going on with the conversion in {work.path}")
    else:
        work.remove()
    for folder in (work.made, work.path / DONE):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(work.path / FACTS, json.dumps(facts))
    try:
        yield work
    except BaseException as error:
        refused = isinstance(error, MoeEdgeError) and not isinstance(error, OutputError)
        if refused or not work.has_items:
            work.remove()
        else:
            say(f"what is done is kept in {work.path}; the same command goes on there")
        raise
    if not work.made.exists():
        work.remove()
