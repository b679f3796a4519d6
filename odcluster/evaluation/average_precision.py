"""Average precision of a ranking, in the two ways that the VOC07 protocols use.

Scores in, numbers out. Images of equal score are one operating point: precision and recall are counted only between
distinct scores, so that neither number depends on the order in which the images are given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Curve = NDArray[np.float64]


def average_precision(scores: ArrayLike, positive: ArrayLike) -> float:
    """Area under the precision-recall curve made monotone, over all of its points (VOC 2010 and later).

    Monotone: at each recall stands the best precision at that recall or a higher one.
    """
    precision, recall_gain = _curve(scores, positive)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best_from_here @ recall_gain)


def raw_average_precision(scores: ArrayLike, positive: ArrayLike) -> float:
    """The same area under the curve as it is, hence never larger: scikit-learn's `average_precision_score`."""
    precision, recall_gain = _curve(scores, positive)
    return float(precision @ recall_gain)


def _curve(scores: ArrayLike, positive: ArrayLike) -> tuple[Curve, Curve]:
    """Precision at each distinct score, highest score first, and the recall gained there."""
    scores, positive = np.asarray(scores, dtype=np.float64), np.asarray(positive)
    if scores.ndim != 1 or positive.shape != scores.shape:
        raise ValueError(
            f"Scores of shape {scores.shape} and truths of shape {positive.shape}; pass one of each per image."
        )
    if positive.dtype != np.bool_:
        raise ValueError(f"The truths are {positive.dtype}; pass booleans, such as `labels == 1`.")
    if not np.isfinite(scores).all():
        raise ValueError("Some scores are not finite, so there is no ranking; check the features they come from.")
    if not positive.any():
        raise ValueError("None of the images is positive, so there is no recall; leave this class out.")
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    num_found = np.cumsum(positive[order])[last_of_score]
    return num_found / (last_of_score + 1), np.diff(num_found, prepend=0) / num_found[-1]
