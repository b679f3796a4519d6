"""config.json: what earlier versions wrote is read, and means the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odcluster.config import Config, changed
from odcluster.config_file import LATER, decisive, differences, fingerprint, from_json, to_json
from odcluster.errors import UserError
from odcluster.recipes import RECIPES, odc_small

FIRST = (Path(__file__).parent / "first_config.json").read_text()
"""As the first version wrote it, everything at its default."""
FINGERPRINTS = {
    "defaults": "e2b16cb550b07dbea43dff4376324a3e08b3e1a70a578ad54424c943f19eb761",
    "changed": "06290b6c832de8a87c2f08a564798cc0ac29a0afabe0e4939aad5f30d309eeae",
}


def test_a_run_of_the_first_version_is_the_same_run_today():
    """An option that is added must be in LATER, or nobody can resume what they have."""
    first = from_json(FIRST)
    assert first == Config()
    assert fingerprint(first) == FINGERPRINTS["defaults"]
    given = changed(first, clusters=100, algorithm="muon", epochs=3, lr=0.1)
    assert fingerprint(given) == FINGERPRINTS["changed"]


def test_later_options_are_options():
    names = {name for value in flat_names(json.loads(to_json(Config()))) for name in value}
    assert names >= LATER
    assert not LATER & {name for value in flat_names(json.loads(FIRST)) for name in value}


def flat_names(values: dict) -> list[set[str]]:
    return [set(values), *(set(value) for value in values.values() if isinstance(value, dict))]


@pytest.mark.parametrize("option", [{"one_pass": True}, {"algorithm": "muon"}, {"seed": 1}, {"precision": "bfloat16"}])
def test_what_decides_changes_the_fingerprint_and_is_named(option):
    other = changed(Config(), **option)
    assert fingerprint(other) != fingerprint(Config())
    (name,) = option
    if name not in LATER:  # else one of the two does not have it
        assert [d.split()[0] for d in differences(decisive(Config()), decisive(other))] == [name]


@pytest.mark.parametrize(
    "option",
    [{"workers": 3}, {"device": "cpu"}, {"data": "/elsewhere"}, {"weights": "there"}, {"checkpoint_minutes": 1.0}],
)
def test_how_the_machine_is_used_does_not(option):
    assert fingerprint(changed(odc_small(), **option)) == fingerprint(odc_small())


@pytest.mark.parametrize("name", RECIPES)
def test_a_configuration_survives_its_file(name):
    config = changed(RECIPES[name](), data="/somewhere", clusters=5)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        (json.dumps({**json.loads(FIRST), "hook": "os.system"}), "unknown keys: hook"),
        (json.dumps({k: v for k, v in json.loads(FIRST).items() if k != "seed"}), "lacks the keys: seed"),
        (to_json(Config()).replace('"seed": 0', '"seed": "0"'), "seed"),
        (to_json(Config()).replace('"method": "odc"', '"method": "os.system"'), "method"),
        (to_json(Config()).replace('"flip": 0.5', '"flip": true'), "flip"),
    ],
)
def test_anything_else_is_refused_by_name(text, says):
    with pytest.raises(UserError, match=says):
        from_json(text)
