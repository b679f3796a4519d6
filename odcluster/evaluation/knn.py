"""Nearest neighbours in feature space: the kNN classifier, and how far neighbourhoods survive training.

Similarity is the cosine, in float32, and is never held for more than a chunk of queries at a time. Features
come in as tensors on any device; accuracies go out as plain numbers. Extracting features is left to others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
CHUNK = 2**25  # similarities held at once: 128 MB


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    ks: Sequence[int] = KS,
    temperature: float = TEMPERATURE,
) -> dict[int, float]:
    """Accuracy, for every k, of a vote of the k nearest training images weighing exp(cosine / temperature).

    Images with a negative label are left out. A k above the number of training images becomes that number, in
    the keys too, so that a key always says how many neighbours voted.
    """
    train, labels = labelled(train_features, train_labels, "training")
    test, truth = labelled(test_features, test_labels, "test")
    check_widths(train, test)
    ks = _capped(ks, len(train))
    indices, similarities = nearest_neighbours(train, test, max(ks))
    return _vote(labels, indices, similarities, truth, ks, temperature)


def leave_one_out_knn_accuracy(
    features: Tensor, labels: Tensor, *, ks: Sequence[int] = KS, temperature: float = TEMPERATURE
) -> dict[int, float]:
    """The same for a data set without a test split: every image is classified by all the others."""
    features, labels = labelled(features, labels, "training")
    if len(features) < 2:
        raise ValueError("Leaving one image out leaves none; at least two labelled images are needed.")
    ks = _capped(ks, len(features) - 1)
    rows = torch.arange(len(features), device=features.device)
    indices, similarities = nearest_neighbours(features, features, max(ks), exclude=rows)
    return _vote(labels, indices, similarities, labels, ks, temperature)


def nearest_neighbours(
    features: Tensor, queries: Tensor, k: int, *, exclude: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k rows of `features` nearest to each query, nearest first: indices and cosines, both [Q, k].

    `exclude` names one row per query that does not count: the query itself, when it is one of the rows.
    """
    available = len(features) - (exclude is not None)
    if not 1 <= k <= available:
        raise ValueError(f"{k} neighbours were asked for; choose k from 1 to {available}, all there are.")
    keys = F.normalize(features.float(), dim=1).T  # [D, N]
    size = max(1, CHUNK // len(features))
    found = []
    for start in range(0, len(queries), size):
        similarity = F.normalize(queries[start : start + size].float(), dim=1) @ keys  # [chunk, N]
        if exclude is not None:
            similarity.scatter_(1, exclude[start : start + size, None], -torch.inf)
        found.append(similarity.topk(k, dim=1))
    if not found:
        return torch.empty(0, k, dtype=torch.long), torch.empty(0, k)
    return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])


def neighbours_kept(before: Tensor, after: Tensor, *, k: int = 10, max_queries: int = 5000) -> float:
    """Mean share of an image's k nearest images before training that are among its k nearest afterwards.

    Row i of both is image i. Above `max_queries` images the mean is over a fixed random choice of that many;
    their neighbours are still looked for among all images, so the choice adds noise but no bias.
    """
    if len(before) != len(after):
        raise ValueError(f"Features of {len(before)} and {len(after)} images; pass those of the same images.")
    before, after = _finite(before, "earlier"), _finite(after, "later")
    if len(before) < 2:
        raise ValueError("An image alone has no neighbours; at least two are needed.")
    k = min(k, len(before) - 1)
    rows = torch.arange(len(before))
    if len(rows) > max_queries:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:max_queries]
    old, _ = nearest_neighbours(before, before[rows], k, exclude=rows.to(before.device))
    new, _ = nearest_neighbours(after, after[rows], k, exclude=rows.to(after.device))
    both = torch.cat([old.cpu(), new.cpu()], dim=1).sort(dim=1).values  # a kept neighbour is there twice
    return float((both[:, 1:] == both[:, :-1]).sum()) / (len(rows) * k)


def labelled(features: Tensor, labels: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """The rows with a label, as float32; a ValueError says what is wrong with the `which` set."""
    if len(features) != len(labels):
        raise ValueError(
            f"The {which} set has {len(features)} features but {len(labels)} labels; "
            "pass one label per image, -1 where there is none."
        )
    labels = labels.to(features.device, torch.long)
    features = _finite(features[labels >= 0], which)
    if not len(features):
        raise ValueError(f"The {which} set has no labelled image; pass one that has.")
    return features, labels[labels >= 0]


def _finite(features: Tensor, which: str) -> Tensor:
    if features.ndim != 2:
        raise ValueError(f"The {which} features have shape {list(features.shape)}; pass one row per image.")
    features = features.float()
    if not torch.isfinite(features).all():
        bad = int((~torch.isfinite(features).all(dim=1)).sum())
        raise ValueError(
            f"The {which} features of {bad} of {len(features)} images are not finite; "
            "use an earlier checkpoint, or extract them in float32."
        )
    return features


def check_widths(train: Tensor, test: Tensor) -> None:
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"Training features have {train.shape[1]} dimensions and test features {test.shape[1]}; "
            "extract both with the same backbone and layer."
        )


def _capped(ks: Sequence[int], available: int) -> tuple[int, ...]:
    if not ks or min(ks) < 1:
        raise ValueError(f"Numbers of neighbours {tuple(ks)}: pass at least one, all above 0, such as {KS}.")
    return tuple(sorted({min(k, available) for k in ks}))


def _vote(
    labels: Tensor,
    indices: Tensor,
    similarities: Tensor,
    truth: Tensor,
    ks: Sequence[int],
    temperature: float,
) -> dict[int, float]:
    if not temperature > 0:
        raise ValueError(f"Temperature {temperature} is not above 0; the usual value is {TEMPERATURE}.")
    classes, labels = labels.unique(return_inverse=True)
    truth = truth.to(classes.device)
    votes = labels[indices]  # [Q, k], nearest first
    # Relative to the nearest neighbour: changes no vote, cannot overflow.
    weights = ((similarities - similarities[:, :1]) / temperature).exp()
    accuracy = {}
    size = max(1, CHUNK // len(classes))
    for k in ks:
        num_right = 0
        for start in range(0, len(votes), size):
            chunk = slice(start, start + size)
            ballot = weights.new_zeros(len(votes[chunk]), len(classes))
            ballot.scatter_add_(1, votes[chunk, :k], weights[chunk, :k])
            num_right += int((classes[ballot.argmax(dim=1)] == truth[chunk]).sum())
        accuracy[k] = num_right / len(votes)
    return accuracy
