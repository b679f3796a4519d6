"""A configuration as config.json, and what of it decides the outcome of a run.

Nothing in a file can do more than set options: keys and types are checked against the dataclasses of config.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from typing import Any

from odcluster.config import GROUPS, Config, Running, checked
from odcluster.errors import UserError


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def decisive(config: Config) -> dict[str, Any]:
    """Everything that decides what is learned: where the images lie and how the machine is used do not."""
    running = Running(precision=config.running.precision)
    kept = dataclasses.replace(config, data="", weights=None, workers=None, device="", running=running)
    return json.loads(json.dumps(_without_later(dataclasses.asdict(kept), Config)))


def fingerprint(config: Config) -> str:
    """Hash of what is decisive."""
    return hashlib.sha256((json.dumps(decisive(config), indent=1) + "\n").encode()).hexdigest()


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Options that differ between two decisive sets, in words."""
    found = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if name in GROUPS:
            found += differences(old or {}, new or {})
        elif old != new:
            found.append(f"{name} was {old} and is {new}")
    return found


def features_fingerprint(config: Config) -> str:
    """Hash of what decides the features of a frozen backbone: not how long or how one learns from them."""
    usual = Config(
        recipe=config.recipe,
        method=config.method,
        backbone=config.backbone,
        image_size=config.image_size,
        seed=config.seed,
        augmentation=config.augmentation,
        fine_tuning=config.fine_tuning,
        running=config.running,
    )
    return fingerprint(usual)


def from_json(text: str) -> Config:
    """The inverse of to_json; a key that is unknown, missing or of the wrong type is refused by name."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"config.json is not JSON ({error})") from error
    return _build(Config, values, "config.json")


LATER = {"companions", "algorithm", "neighbours", "final_pass", "kmeans_restarts", "fine_share", "fine_clusters"}
LATER |= {"frozen", "cached_views", "one_pass"}
"""Options that runs of the first version do not have. Their defaults are what those runs did, so that such a run can be
opened and resumed: a default of these has no part in the fingerprint either."""


def _without_later(values: Any, cls: Any) -> dict[str, Any]:
    """The values of a configuration without later options that are at their default."""
    usual, kept = dataclasses.asdict(cls()), {}
    for name, value in values.items():
        if name in LATER and value == usual[name]:
            continue
        kept[name] = _without_later(value, GROUPS[name]) if name in GROUPS else value
    return kept


def _build(cls: Any, values: Any, where: str) -> Any:
    types = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        raise UserError(f"{where} must be an object, not {type(values).__name__}")
    names = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - names):
        raise UserError(f"{where} has unknown keys: {', '.join(unknown)}")
    if missing := sorted(names - set(values) - LATER):
        raise UserError(f"{where} lacks the keys: {', '.join(missing)}")
    built = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(types[name]):
            built[name] = _build(types[name], value, f"{where}: {name}")
        else:
            built[name] = checked(value, types[name], f"{where}: {name}")
    return cls(**built)
