"""From the dataclasses of config.py and verbs.py to the options of a verb: one definition for everything.

A field's docstring is the help of its option, and a recipe's value its default. `parse` hands the words to tyro, which
is imported only then, so that the list of verbs is immediate.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from functools import cache
from typing import Annotated, Any

from odcluster import config, verbs
from odcluster.config import GROUPS, Config

LEFT_OPEN = {"weights", "max_steps", "minutes"}
"""Options that stay open when not given; all others that have no default are chosen from the data."""

Option = tuple[Any, Any]  # annotated type, default (dataclasses.MISSING: required)


def required(metavar: str, help: str) -> Option:
    import tyro

    return Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar=metavar, help=help)], dataclasses.MISSING


def optional(metavar: str, help: str, default: Any, kind: Any = str, hint: str = "") -> Option:
    """An option that may be left open; the hint says what happens then."""
    import tyro

    hint = hint if default is None else f"(default: {shown(default)})"
    return Annotated[kind | None, tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint=hint)], default


def flag(help: str) -> Option:
    """An option that takes no value."""
    import tyro

    return Annotated[bool, tyro.conf.arg(help=help, help_behavior_hint="")], False


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def chosen_recipe(given: list[str]) -> str:
    """The recipe when none is named: that of the method. Needed before parsing, because it gives the other defaults."""
    from odcluster.recipes import RECIPES, default_recipe

    weights = given_value("weights", given) is not None
    named = default_recipe(given_value("method", given) or Config.method, weights=weights)
    return named if named in RECIPES else Config.recipe  # a method that does not exist is refused by the parser


def given_value(option: str, given: list[str]) -> str | None:
    """What follows --option, if it is there."""
    for at, word in enumerate(given):
        if word == f"--{option}" and at + 1 < len(given):
            return given[at + 1]
        if word.startswith(f"--{option}="):
            return word.split("=", 1)[1]
    return None


def parse_options(verb: str, about: Any, given: list[str], default: Config, extra: dict[str, Option]) -> dict[str, Any]:
    """Parse the verb's own options and all of Config's; `--help` shows the main ones, `--help-all` every one."""
    everything = "--help-all" in given
    brief = not everything and ("--help" in given or "-h" in given)
    given = ["--help" if word == "--help-all" else word for word in given]
    out = {"out": optional("RUN", "The run directory to make (default: runs/NAME of the data).", None)}
    fields = {**extra, **out, **options_of(Config, default, skip={"data", *GROUPS})}
    groups = {} if brief else {name: options_of(cls, getattr(default, name)) for name, cls in GROUPS.items()}
    note = f"\n\n{sum(len(dataclasses.fields(g)) for g in GROUPS.values())} more options: --help-all." if brief else ""
    return parse(verb, about, given, fields, groups, note)


def parse(
    verb: str,
    about: Any,
    given: list[str],
    fields: dict[str, Option],
    groups: dict[str, dict[str, Option]] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Values of all fields and of all groups' fields, by name."""
    import tyro

    groups = groups or {}
    made = {name: made_class(name, inner, GROUPS[name].__doc__) for name, inner in groups.items()}
    whole = {**fields, **{name: (cls, cls()) for name, cls in made.items()}}
    arguments = tyro.cli(
        made_class(verb, whole, inspect.getdoc(about)),
        prog=f"odcluster {verb}",
        args=given,
        description=f"{inspect.getdoc(about)}{note}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    values = {name: getattr(arguments, name) for name in fields}
    for name, inner in groups.items():
        values |= {option: getattr(getattr(arguments, name), option) for option in inner}
    return values


def made_class(name: str, fields: dict[str, Option], about: str | None) -> Any:
    columns = [
        (field, kind) if default is dataclasses.MISSING else (field, kind, dataclasses.field(default=default))
        for field, (kind, default) in fields.items()
    ]
    cls = dataclasses.make_dataclass(name, columns, frozen=True)
    cls.__doc__ = about
    return cls


def options_of(cls: Any, values: Any, skip: set[str] | None = None) -> dict[str, Option]:
    """One option per field of a dataclass of config.py, its docstring as help, the recipe's value as default."""
    import tyro

    options: dict[str, Option] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if skip and name in skip:
            continue
        default, help = getattr(values, name), doc(name, cls)
        if type(None) in typing.get_args(kind):
            bare = next(k for k in typing.get_args(kind) if k is not type(None))
            hint = "" if name in LEFT_OPEN or "Not given:" in help else "(default: chosen for you)"
            several = typing.get_origin(bare) is tuple
            metavar = f"{typing.get_args(bare)[0].__name__.upper()} ..." if several else bare.__name__.upper()
            options[name] = optional(metavar, help, default, bare, hint)
        else:
            hint = f"(default: {shown(default)})"
            about = [tyro.conf.arg(help=help, help_behavior_hint=hint)]
            about += [tyro.conf.FlagConversionOff] if kind is bool and takes_values(cls) else []
            options[name] = Annotated[kind, *about], default
    return options


def takes_values(cls: Any) -> bool:
    """Whether yes-or-no options want to be told which: a recipe may have said yes. Those of a verb alone are flags."""
    return cls is Config or cls in GROUPS.values()


def doc(name: str, cls: Any = Config) -> str:
    """The docstring that stands below a field in config.py or verbs.py."""
    return field_docs()[cls.__name__][name]


@cache
def field_docs() -> dict[str, dict[str, str]]:
    docs: dict[str, dict[str, str]] = {}
    for node in [node for module in (config, verbs) for node in ast.parse(inspect.getsource(module)).body]:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {
                field.target.id: " ".join(str(following.value.value).split())
                for field, following in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            }
    return docs
