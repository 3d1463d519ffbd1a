"""Which options a plug-in takes: the fields of its class."""

import dataclasses


def options_of(found: type) -> list[dataclasses.Field]:
    """Fields that can be given; a class that is no dataclass has none."""
    if not dataclasses.is_dataclass(found):
        return []
    return [field for field in dataclasses.fields(found) if field.init]


def needed(found: type) -> list[str]:
    """Options that have no default."""
    return [
        field.name
        for field in options_of(found)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
