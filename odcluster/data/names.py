"""Names of files are other people's text: how to print them, and how to write them for a spreadsheet."""

from __future__ import annotations

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # noqa: RUF001  the wide forms count too


def shown(name: str) -> str:
    """Make a name fit to be printed: control characters and undecodable bytes escaped."""
    return name if name.isprintable() else ascii(name)


def guard(name: str) -> str:
    """The name as a spreadsheet may show it: never a formula. `unguard` gives the name back."""
    dangerous = name.lstrip().startswith(FORMULA_STARTS) or name.startswith(("\t", "\r", "\n", "'"))
    return "'" + name if dangerous else name


def unguard(cell: str) -> str:
    return cell.removeprefix("'")
