"""What a model thinks before it answers, told apart from the answer by markers.

Templates of models that think name the markers, and often open the first themselves, so
that the answer's text begins inside. Text goes through a `Split` as it comes; a marker
may arrive in pieces.
"""

from typing import NamedTuple

from moe_edge.serve.markers import begun


class Markers(NamedTuple):
    """Texts around what a model thinks."""

    begin: str
    end: str


# Of DeepSeek, Qwen, GLM, MiniMax and others; of Mistral; of Gemma 4.
KNOWN = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<|channel>thought\n", "<channel|>"),
)


class Reasoning(NamedTuple):
    """How the text after a prompt is to be read.

    Attributes:
      inside: whether the prompt already opened the first marker.
    """

    markers: Markers
    inside: bool


def markers_of(template: str) -> Markers | None:
    """The markers that a chat template names; None for models that do not think."""
    for markers in KNOWN:
        if markers.begin.strip() in template or markers.end in template:
            return markers
    return None


def reasoning_after(prompt: str, markers: Markers | None) -> Reasoning | None:
    """How the text after a rendered prompt is read."""
    if markers is None:
        return None
    opened = prompt.rfind(markers.begin.strip())
    inside = opened >= 0 and not prompt[opened:].strip()[len(markers.begin.strip()) :]
    return Reasoning(markers, inside)


class Split:
    """Sorts the text of a row, as it comes, into what is thought and what is said.

    White space next to a marker belongs to neither.
    """

    def __init__(self, reasoning: Reasoning):
        self._begin, self._end = reasoning.markers
        self._inside = reasoning.inside
        self._may_begin = not reasoning.inside  # only before anything is said
        self._held = ""
        self._at_edge = True  # white space here belongs to no side

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """(thought, said) of some more text; what may be part of a marker waits.

        Args:
          is_last: no text follows.
        """
        thought, said = [], []
        self._held += text
        while True:
            if self._at_edge:
                self._held = self._held.lstrip()
            marker = self._end if self._inside else self._begin
            if self._inside or self._may_begin:
                at = self._held.find(marker)
                if at == 0 or (at > 0 and self._inside):
                    thought.append(self._held[:at].rstrip())
                    self._held = self._held[at + len(marker) :]
                    self._inside, self._at_edge = not self._inside, True
                    self._may_begin = False
                    continue
            ready = len(self._held) if is_last else self._certain(marker)
            piece, self._held = self._held[:ready], self._held[ready:]
            if piece:
                (thought if self._inside else said).append(piece)
                self._at_edge = False
                self._may_begin &= self._inside
            return "".join(thought), "".join(said)

    def _certain(self, marker: str) -> int:
        """How many characters are no part of a marker, nor white space before one."""
        held = self._held
        if not self._inside:
            opens = self._may_begin and marker.startswith(held)
            return 0 if opens else len(held)
        return len(held[: len(held) - begun(held, marker)].rstrip())
