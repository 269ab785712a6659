"""Versions of modules' formats, which torch keeps beside the entries of a state dict, where a state dict is made anew.

A module that has changed its entries over time gives itself a `_version`, and changes those of an earlier one when it
loads them. Without versions it takes them for entries of its first one (torchvision's MNASNet refuses them).
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

Versions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What torch keeps for each module, by its dotted name."""


def versions_of(state_dict: Any) -> Versions | None:
    """The versions that a state dict has; None if it is a plain dict."""
    return getattr(state_dict, "_metadata", None)


def versioned(entries: Mapping[str, Any], versions: Versions | None) -> dict[str, Any]:
    """A state dict of some entries with these versions; without any if they are None."""
    made: Any = OrderedDict(entries)
    if versions is not None:
        made._metadata = OrderedDict(versions)
    return made  # type: ignore[no-any-return]


def joined_versions(base: Mapping[str, Any], entries: Mapping[str, Any]) -> Versions | None:
    """Versions for a state dict in which some entries take the place of others: each module's own are its entries'.

    Args:
        base: The state dict of all entries.
        entries: Those that take their places; without versions, those of `base` hold for them.
    """
    own, theirs = versions_of(base), versions_of(entries)
    if theirs is None:
        return own
    modules = {name.rpartition(".")[0] for name in entries}
    return {**(own or {}), **{name: versions for name, versions in theirs.items() if name in modules}}
