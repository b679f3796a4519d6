"""Which labelled images train a probe and which test it.

Promises: no image is on both sides; a class is the same class on both sides, by its name, whatever the order in which
each side lists them; what was left out, and how the images were divided, is said in words that a result can carry.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from odcluster.data.annotations import Annotations, annotations_of
from odcluster.data.randomness import Purpose, uniforms
from odcluster.data.sources import SPLITS, Manifest, Source, available_splits, open_source
from odcluster.errors import DataError, UserError
from odcluster.verbs import Evaluation

HELD_OUT = 0.2
"""Share of the images that test, where the data has no part for it."""
SEVERAL_CLASSES = ("svm", "lowshot")
"""Tasks for images that may show several classes."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Images of one side: a source, which of its images, what they show, and what part of the data that is."""

    source: Source
    ids: Ids
    """Sorted; images without a label are not among them."""
    truth: Annotations | NDArray[np.int64]
    """Of these images: presence of every class or, for tasks of one class per image, its number."""
    split: str
    given: str
    """The path as the user gave it."""

    def images(self) -> str:
        """Hash of which images these are."""
        digest = hashlib.sha256(self.source.manifest.fingerprint().encode())
        digest.update(self.ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Hash of which images these are and what they are said to show."""
        names = self.truth.class_names if isinstance(self.truth, Annotations) else self.source.manifest.class_names
        values = self.truth.values if isinstance(self.truth, Annotations) else self.truth
        digest = hashlib.sha256(self.images().encode() + "\0".join(names or []).encode(errors="surrogateescape"))
        digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def choose(self, keep: NDArray[np.bool_], split: str) -> Part:
        truth = self.truth
        if isinstance(truth, Annotations):
            truth = Annotations(truth.class_names, truth.values[keep], truth.known[keep])
        else:
            truth = truth[keep]
        return Part(self.source, self.ids[keep], truth, split, self.given)


@dataclass(frozen=True)
class Parts:
    """Both sides, and what has to be said about them."""

    train: Part
    test: Part
    notes: list[str] = field(default_factory=list)
    """What was left out."""
    deviations: list[str] = field(default_factory=list)
    """How this division differs from a data set's own."""


def open_parts(options: Evaluation) -> Parts:
    """Open what the options name; both sides hold labelled images only."""
    if options.data is None:
        raise UserError("give labelled images with --data")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        parts = _open(options.data, options)
    notes = list(dict.fromkeys(str(warning.message) for warning in said if issubclass(warning.category, UserWarning)))
    return Parts(parts.train, parts.test, [*notes, *parts.notes], parts.deviations)


def _open(data: str, options: Evaluation) -> Parts:
    train_split, test_split = _asked_splits(options.split)
    train = open_source(data, train_split)
    own = available_splits(data)
    if train_split is None and "train" in own and {"val", "test"} & own and train.manifest.kind != "voc":
        train_split = "train"  # what open_source takes where a folder or file is divided so
    if options.test is not None:
        test_split = test_split or _test_split(options.test)
        test = open_source(options.test, test_split)
    else:
        test_split = test_split or _own_test_split(data, train, own)
        if test_split is None:
            return _divided(_part(train, None, data, options), options)
        test = open_source(data, test_split)
    train_part = _part(train, train_split, data, options)
    test_part = _part(test, test_split, options.test or data, options)
    _check_disjoint(train_part.source.manifest, test_part.source.manifest)
    return Parts(train_part, test_part, [*_left_out(train_part), *_left_out(test_part)])


def _asked_splits(split: str | None) -> tuple[str | None, str | None]:
    if split is None:
        return None, None
    train, slash, test = split.partition("/")
    if not slash or train not in SPLITS or test not in SPLITS or train == test:
        raise UserError(f"--split {split} must name two parts out of {', '.join(SPLITS)}, as in --split train/val")
    return train, test


def _test_split(test: str) -> str | None:
    """The part for testing of what was given for testing: its test part, else its val part, else all of it."""
    found = available_splits(test)
    if "test" in found:
        return "test"
    return "val" if "val" in found and "trainval" not in found else None  # VOC's val is a part of its trainval


def _own_test_split(data: str, train: Source, own: set[str]) -> str | None:
    """The test part of the data itself; None if it is one undivided heap."""
    if train.manifest.kind == "voc" and "test" not in own:
        raise DataError(f"{data} has no test images, VOC's usual ones; give them with --test, or use --split train/val")
    return next((split for split in ("test", "val") if split in own), None)


def _part(source: Source, split: str | None, given: str, options: Evaluation) -> Part:
    """The images of a source that have a label: one class each or, where several may be present, any statement."""
    split = split or {"voc": "trainval", "cifar10": "train"}.get(source.manifest.kind, "all")
    truth: Annotations | NDArray[np.int64]
    if options.task in SEVERAL_CLASSES:
        truth = annotations_of(source, split if source.manifest.kind == "voc" else None, given)
        known = truth.known
    else:
        labels = source.manifest.labels
        truth = np.full(len(source), -1, np.int64) if labels is None else labels
        known = truth >= 0
    if not known.any():
        raise DataError(
            f"the images in {given} have no labels; give a folder per class, a list with labels, or labelled arrays"
        )
    return Part(source, np.arange(len(source), dtype=np.int64), truth, split, given).choose(known, split)


def _left_out(part: Part) -> list[str]:
    missing = len(part.source) - len(part.ids)
    return (
        [f"{missing:,} of {len(part.source):,} images in {part.given} have no label and are left out"]
        if missing
        else []
    )


def _divided(whole: Part, options: Evaluation) -> Parts:
    """A fifth of every class, drawn by the seed, tests; the rest trains. Where images show several classes: of all."""
    truth = whole.truth
    if isinstance(truth, Annotations):
        single = ((truth.values == 1).sum(axis=1) == 1).all()
        strata = truth.values.argmax(axis=1) if single else np.zeros(len(whole.ids), np.int64)
    else:
        single, strata = True, truth
    draws = uniforms(options.seed, Purpose.ORDER, 0, whole.ids, 1, 1)[:, 0]
    testing = np.zeros(len(whole.ids), bool)
    for number in np.unique(strata):
        members = np.flatnonzero(strata == number)
        count = round(HELD_OUT * len(members))
        testing[members[np.argsort(draws[members], kind="stable")[:count]]] = True
    if not testing.any():
        raise DataError(
            f"{whole.given} has too few images per class to set a fifth aside for testing; give --test, or more images"
        )
    of = "every class" if single else "all images"
    return Parts(
        whole.choose(~testing, f"four fifths, seed {options.seed}"),
        whole.choose(testing, f"one fifth, seed {options.seed}"),
        _left_out(whole),
        [f"no test part: a fifth of {of}, drawn with seed {options.seed}, was set aside for testing"],
    )


def _check_disjoint(train: Manifest, test: Manifest) -> None:
    """Refuse images that are on both sides, also under another name of their folder."""
    if train.kind == test.kind == "voc":  # a VOC image has its number wherever its folder lies
        both = len({os.path.basename(path) for path in train.paths} & {os.path.basename(path) for path in test.paths})
    elif train.content or test.content:
        both = len(train) if train.fingerprint() == test.fingerprint() else 0
    else:
        both = len(_real_paths(train) & _real_paths(test))
    if both:
        raise DataError(f"{both:,} images would be used for training and for testing; give other images with --test")


def _real_paths(manifest: Manifest) -> set[str]:
    root = os.path.realpath(manifest.root)
    if manifest.kind == "list":  # may lead anywhere
        return {os.path.realpath(os.path.join(root, path)) for path in manifest.paths}
    return {os.path.join(root, path) for path in manifest.paths}


def class_labels(parts: Parts) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """One class number per image of either side, and the names; a class only the test side has gets a number too."""
    sides = []
    for part in (parts.train, parts.test):
        assert not isinstance(part.truth, Annotations)
        present, inverse = np.unique(part.truth, return_inverse=True)
        named = part.source.manifest.class_names
        sides.append(([named[number] if named else str(number) for number in present.tolist()], inverse))
    (train_names, train), (test_names, test) = sides
    if not set(train_names) & set(test_names):
        raise DataError(
            f"training and test images have no class in common ({train_names[0]}, ... and {test_names[0]}, ...); "
            "name the classes alike on both sides"
        )
    if len(train_names) < 2:
        raise DataError(f"all training images are of one class, {train_names[0]}; give images of at least two")
    names = [*train_names, *(name for name in test_names if name not in set(train_names))]
    number = {name: at for at, name in enumerate(names)}
    return train.astype(np.int64), np.array([number[name] for name in test_names], np.int64)[test], names


def class_annotations(parts: Parts) -> tuple[Annotations, Annotations, list[str]]:
    """Presence of every class of the training side in every image of either side, and what to say about others.

    A class that the test side does not know is absent from all its images.
    """
    train, test = parts.train.truth, parts.test.truth
    assert isinstance(train, Annotations)
    assert isinstance(test, Annotations)
    common = [name for name in train.class_names if name in test.class_names]
    if not common:
        raise DataError("training and test images have no class in common; name the classes alike on both sides")
    values = np.full((len(test.values), len(train.class_names)), -1, np.int8)
    for column, name in enumerate(train.class_names):
        if name in common:
            values[:, column] = test.values[:, test.class_names.index(name)]
    extra = [name for name in test.class_names if name not in train.class_names]
    notes = (
        [f"{len(extra)} classes that only the test images have ({', '.join(extra[:3])}) are not judged"]
        if extra
        else []
    )
    return train, Annotations(train.class_names, values, test.known), notes
