"""Markers in a text that arrives in pieces."""


def begun(text: str, marker: str) -> int:
    """With how many characters of a marker's beginning, but not all, a text ends."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in sizes if marker.startswith(text[-n:])), 0)
