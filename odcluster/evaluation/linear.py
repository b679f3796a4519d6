"""The fast linear probe: logistic regression on frozen features, for a verdict in seconds.

Promises: deterministic, no learning rate to tune, the optimum that scikit-learn's `LogisticRegression` has
for the same strength. It is not the paper's ImageNet / Places205 protocol (SGD over augmented images, layer
by layer), and its numbers must not be set beside that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from odcluster.evaluation.knn import check_widths, labelled

L2_GRID = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
MAX_ITERATIONS = 300
GRADIENT_TOLERANCE = 1e-4  # largest entry of the mean loss's gradient; scikit-learn's default
CHOOSING_TOLERANCE = 1e-3
"""Of the fits that choose a strength: a third of the work for held-out accuracies that differ less than their error."""


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """What a linear probe found."""

    accuracy: float
    """Share of the test images that are classified correctly."""
    log_loss: float
    """Mean negative log-likelihood of the test images of classes seen in training (nan if there are none)."""
    train_accuracy: float
    l2: float
    """Chosen weight of |W|^2 / 2 beside the mean loss; scikit-learn's C is 1 / (l2 * num_train)."""
    held_out_accuracy: dict[float, float]
    """Accuracy on the held-out tenth for every l2 tried; empty when there was nothing to choose."""
    converged: bool
    """Whether the final fit reached its tolerance rather than its iteration limit."""
    num_train: int
    num_test: int
    num_classes: int


@dataclass(frozen=True)
class LogisticRegression:
    """Weights [C, D] and bias [C] of a fitted classifier."""

    weight: Tensor
    bias: Tensor
    converged: bool

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    l2_grid: Sequence[float] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> LinearProbe:
    """Standardise, choose the l2 strength on a held-out tenth of the training set, fit on all of it, test.

    Images with a negative label are left out. A test image of a class unseen in training counts as wrong. `poll` is
    called at every step of the fits, and may raise to stop.
    """
    grid = sorted(set(L2_GRID if l2_grid is None else l2_grid), reverse=True)
    if not grid or not grid[-1] > 0:
        raise ValueError(f"The l2 strengths {grid} are none or not all above 0; {L2_GRID} is the default.")
    train, train_labels = labelled(train_features, train_labels, "training")
    test, truth = labelled(test_features, test_labels, "test")
    check_widths(train, test)
    classes, targets = train_labels.unique(return_inverse=True)
    if len(classes) < 2:
        raise ValueError("The training set has a single class; pass images of at least two.")
    train, test = _standardise(train, test)

    start: LogisticRegression | None = None
    chosen, held_out = grid[0], dict[float, float]()
    if len(grid) > 1:
        chosen, start, held_out = _choose_l2(train, targets, len(classes), grid, poll)
    model = fit_logistic_regression(train, targets, len(classes), chosen, start=start, poll=poll)
    truth = truth.to(classes.device)
    logits = model.logits(test)
    known = torch.isin(truth, classes)
    return LinearProbe(
        accuracy=_share(classes[logits.argmax(dim=1)] == truth),
        log_loss=float(F.cross_entropy(logits[known], torch.searchsorted(classes, truth[known]))),
        train_accuracy=_share(model.logits(train).argmax(dim=1) == targets),
        l2=chosen,
        held_out_accuracy=held_out,
        converged=model.converged,
        num_train=len(train),
        num_test=len(test),
        num_classes=len(classes),
    )


def fit_logistic_regression(
    x: Tensor,
    targets: Tensor,
    num_classes: int,
    l2: float,
    *,
    start: LogisticRegression | None = None,
    tolerance: float = GRADIENT_TOLERANCE,
    poll: Callable[[], None] = lambda: None,
) -> LogisticRegression:
    """Minimise mean cross-entropy + l2 / 2 |W|^2 by full-batch L-BFGS, bias free. `start` saves steps."""
    weight = x.new_zeros(num_classes, x.shape[1]) if start is None else start.weight.clone()
    bias = x.new_zeros(num_classes) if start is None else start.bias.clone()
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        poll()
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), targets) + 0.5 * l2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
        closure()
    largest = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    return LogisticRegression(weight.detach(), bias.detach(), largest <= tolerance)


def pool_stage(feature_map: Tensor, max_dims: int = 9600) -> Tensor:
    """Average-pool [B, C, H, W] to the largest square grid of at most `max_dims` dimensions, flat: [B, D].

    The grid never exceeds the map, and is 1 x 1 (plain global pooling) when the channels alone are too many.
    """
    if feature_map.ndim != 4:
        raise ValueError(f"A stage's output has shape {list(feature_map.shape)}; pooling needs [B, C, H, W].")
    _, channels, height, width = feature_map.shape
    side = max(1, min(isqrt(max_dims // channels), height, width))
    where = feature_map.device
    if where.type == "mps":  # which has this pooling only for sizes that divide each other
        return F.adaptive_avg_pool2d(feature_map.cpu(), side).flatten(1).to(where)
    return F.adaptive_avg_pool2d(feature_map, side).flatten(1)


def _choose_l2(
    x: Tensor, targets: Tensor, num_classes: int, grid: Sequence[float], poll: Callable[[], None]
) -> tuple[float, LogisticRegression, dict[float, float]]:
    """The strength with the best accuracy on a held-out tenth, class by class; of equals, the strongest. With its fit
    to the other nine tenths, from which the fit to all is near, and the accuracies.

    Each fit starts from the one before: from strong to weak, the path to the next optimum is short. Once a fit is
    clearly worse than the best so far, weaker ones, which overfit more and take longest, are left out.
    """
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    by_class = shuffled[targets[shuffled].argsort(stable=True)]
    held = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    held[by_class[::10]] = True
    fit_x, fit_targets, held_x, held_targets = x[~held], targets[~held], x[held], targets[held]
    accuracy: dict[float, float] = {}
    models: dict[float, LogisticRegression] = {}
    model: LogisticRegression | None = None
    for l2 in grid:
        model = models[l2] = fit_logistic_regression(
            fit_x, fit_targets, num_classes, l2, start=model, tolerance=CHOOSING_TOLERANCE, poll=poll
        )
        accuracy[l2] = _share(model.logits(held_x).argmax(dim=1) == held_targets)
        if accuracy[l2] < max(accuracy.values()) - len(held_x) ** -0.5:  # two standard errors and more
            break
    chosen = max(accuracy, key=lambda l2: accuracy[l2])
    return chosen, models[chosen], accuracy


def _standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Mean 0 and deviation 1 per dimension on the training set; what never varies is only centred."""
    std, mean = torch.std_mean(train, dim=0, correction=0)
    std = torch.where(std <= 1e-6 * mean.abs(), 1.0, std)  # what float32 rounding leaves of a constant
    return (train - mean) / std, (test - mean) / std


def _share(right: Tensor) -> float:
    return float(right.double().mean())
