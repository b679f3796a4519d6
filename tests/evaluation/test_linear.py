"""The linear probe: scikit-learn's optimum, chosen without the test set, and plain words for bad input."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from odcluster.evaluation.linear import fit_logistic_regression, linear_probe, pool_stage


def blobs(seed: int, num: int, spread: float, dim: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    centres = 3 * torch.randn(4, dim, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num,), generator=generator)
    scales = torch.logspace(-3, 3, dim)  # without standardising, L-BFGS would crawl
    return (centres[labels] + spread * torch.randn(num, dim, generator=generator)) * scales + 5, labels


def test_separable_classes_are_separated() -> None:
    probe = linear_probe(*blobs(0, 200, 0.3), *blobs(1, 100, 0.3))
    assert probe.accuracy == probe.train_accuracy == 1.0
    assert probe.converged
    assert (probe.num_train, probe.num_test, probe.num_classes) == (200, 100, 4)


def test_random_labels_stay_at_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = (
        torch.randn(3000, 30, generator=generator),
        torch.randint(4, (3000,), generator=generator),
    )
    probe = linear_probe(features[:1000], labels[:1000], features[1000:], labels[1000:])
    standard_error = (0.25 * 0.75 / 2000) ** 0.5  # 0.0097
    assert abs(probe.accuracy - 0.25) < 4 * standard_error


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_fit_is_that_of_scikit_learn(l2: float) -> None:
    (train, labels), (test, truth) = blobs(2, 600, 5.0), blobs(3, 400, 5.0)
    scaler = StandardScaler().fit(train.double().numpy())
    reference = LogisticRegression(C=1 / (l2 * 600), max_iter=5000, tol=1e-8)
    reference.fit(scaler.transform(train.double().numpy()), labels.numpy())
    x = scaler.transform(test.double().numpy())

    probe = linear_probe(train, labels, test, truth, l2_grid=(l2,))
    expected = log_loss(truth.numpy(), reference.predict_proba(x))
    assert 0.3 < reference.score(x, truth.numpy()) < 0.99
    assert probe.log_loss == pytest.approx(expected, abs=1e-3)
    assert probe.accuracy == pytest.approx(reference.score(x, truth.numpy()), abs=0.01)
    standardised = torch.tensor(scaler.transform(train.double().numpy()), dtype=torch.float32)
    model = fit_logistic_regression(standardised, labels, 4, l2)
    predicted = model.logits(torch.tensor(x, dtype=torch.float32)).argmax(dim=1).numpy()
    assert np.mean(predicted == reference.predict(x)) >= 0.99


def test_start_does_not_change_where_the_fit_ends() -> None:
    train, labels = blobs(4, 300, 5.0)
    train = (train - train.mean(0)) / train.std(0)
    cold = fit_logistic_regression(train, labels, 4, 1e-2)
    warm = fit_logistic_regression(train, labels, 4, 1e-2, start=fit_logistic_regression(train, labels, 4, 1.0))
    torch.testing.assert_close(cold.logits(train), warm.logits(train), atol=2e-2, rtol=0)


def test_strength_is_chosen_on_the_held_out_tenth_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(4, 150, generator=generator) * 0.4
    labels = torch.randint(4, (600,), generator=generator)
    features = centres[labels] + torch.randn(600, 150, generator=generator)
    probe = linear_probe(features[:200], labels[:200], features[200:], labels[200:])
    best = max(probe.held_out_accuracy.values())
    assert probe.held_out_accuracy[probe.l2] == best
    assert all(l2 <= probe.l2 for l2, accuracy in probe.held_out_accuracy.items() if accuracy == best)
    other = linear_probe(features[:200], labels[:200], features[200:], 3 - labels[200:])
    assert (other.l2, other.held_out_accuracy) == (probe.l2, probe.held_out_accuracy)
    assert other.accuracy < probe.accuracy


def test_weaker_strengths_are_left_out_once_they_are_clearly_worse() -> None:
    generator = torch.Generator().manual_seed(7)
    centres = torch.zeros(4, 300)
    centres[:, :4] = torch.randn(4, 4, generator=generator)  # the other 296 dimensions are noise to overfit on
    labels = torch.randint(4, (2000,), generator=generator)
    features = centres[labels] + torch.randn(2000, 300, generator=generator)
    grid = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
    probe = linear_probe(features[:1000], labels[:1000], features[1000:], labels[1000:], l2_grid=grid)
    tried = list(probe.held_out_accuracy.values())
    assert list(probe.held_out_accuracy) == [1.0, 1e-1, 1e-2, 1e-3]  # the weakest would be the next
    assert tried[-1] < max(tried) - 0.1 <= min(tried[:-1])  # a hundred images are held out
    weakest = linear_probe(features[:1000], labels[:1000], features[1000:], labels[1000:], l2_grid=grid[-1:])
    assert probe.accuracy > weakest.accuracy


def test_choosing_a_strength_leaves_the_fit_where_it_would_end_without() -> None:
    (train, labels), (test, truth) = blobs(13, 600, 5.0), blobs(14, 400, 5.0)
    chosen = linear_probe(train, labels, test, truth)
    alone = linear_probe(train, labels, test, truth, l2_grid=(chosen.l2,))
    assert len(chosen.held_out_accuracy) > 1
    assert chosen.converged
    assert chosen.log_loss == pytest.approx(alone.log_loss, abs=1e-3)
    assert chosen.accuracy == pytest.approx(alone.accuracy, abs=0.005)


def test_held_out_images_are_not_fitted() -> None:
    generator = torch.Generator().manual_seed(6)
    features, labels = torch.randn(200, 500, generator=generator), torch.arange(200) % 4
    probe = linear_probe(features, labels, features, labels)  # more dimensions than images: any fit is perfect
    assert probe.accuracy == 1.0
    assert max(probe.held_out_accuracy.values()) < 0.7


def test_same_input_gives_the_same_numbers_whatever_the_global_seed() -> None:
    torch.manual_seed(1)
    first = linear_probe(*blobs(6, 150, 5.0), *blobs(7, 80, 5.0))
    torch.manual_seed(2)
    assert dataclasses.asdict(linear_probe(*blobs(6, 150, 5.0), *blobs(7, 80, 5.0))) == dataclasses.asdict(first)


def test_class_names_constant_dimensions_and_unlabelled_images_do_not_matter() -> None:
    (train, labels), (test, truth) = blobs(8, 200, 5.0), blobs(9, 100, 5.0)
    expected = linear_probe(train, labels, test, truth)
    names = torch.tensor([3, 50, 51, 10**10])
    with_constant = torch.cat([train, torch.full((200, 1), 1234.567)], dim=1)
    test_constant = torch.cat([test, torch.full((100, 1), 1234.567)], dim=1)
    probe = linear_probe(
        torch.cat([with_constant, torch.zeros(7, 21)]),
        torch.cat([names[labels], torch.full((7,), -1)]),
        test_constant,
        names[truth],
    )
    assert probe.accuracy == expected.accuracy
    assert probe.log_loss == pytest.approx(expected.log_loss, abs=1e-3)


def test_a_dimension_that_varies_by_rounding_alone_counts_as_constant() -> None:
    (train, labels), (test, truth) = blobs(8, 200, 0.3), blobs(9, 100, 0.3)
    constant = torch.full((200, 1), 1000.0)
    constant[::2] = torch.nextafter(constant[::2], torch.tensor(torch.inf))
    probe = linear_probe(
        torch.cat([train, constant], dim=1),
        labels,
        torch.cat([test, torch.full((100, 1), 1001.0)], dim=1),
        truth,
    )
    assert probe.accuracy == 1.0


def test_a_class_unseen_in_training_counts_as_wrong() -> None:
    (train, labels), (test, truth) = blobs(10, 200, 0.3), blobs(11, 100, 0.3)
    seen = labels != 2
    probe = linear_probe(train[seen], labels[seen], test, truth, l2_grid=(1e-3,))
    assert probe.accuracy == pytest.approx(float((truth != 2).double().mean()))
    assert probe.log_loss < 0.1


def test_works_under_no_grad_and_for_a_handful_of_images() -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = linear_probe(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3))
    assert probe.accuracy == 1.0


def test_bad_input_is_refused_with_a_remedy() -> None:
    train, labels = blobs(12, 40, 1.0)
    with pytest.raises(ValueError, match="single class; pass images of at least two"):
        linear_probe(train, torch.zeros(40), train, labels)
    with pytest.raises(ValueError, match="test set has no labelled image"):
        linear_probe(train, labels, train[:0], labels[:0])
    with pytest.raises(ValueError, match="40 features but 39 labels"):
        linear_probe(train, labels[1:], train, labels)
    with pytest.raises(ValueError, match="same backbone and layer"):
        linear_probe(train, labels, train[:, :3], labels)
    with pytest.raises(ValueError, match="not all above 0"):
        linear_probe(train, labels, train, labels, l2_grid=(1.0, 0.0))
    bad = train.clone()
    bad[0, 0], bad[5, 1] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="test features of 2 of 40 images are not finite"):
        linear_probe(train, labels, bad, labels)


@pytest.mark.parametrize(
    ("shape", "side"),
    [
        ((2, 96, 55, 55), 10),
        ((2, 2048, 7, 7), 2),
        ((2, 9600, 4, 4), 1),
        ((2, 20000, 4, 4), 1),
        ((2, 8, 5, 9), 5),
    ],
)
def test_pooling_takes_the_largest_grid_that_fits(shape: tuple[int, ...], side: int) -> None:
    maps = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    pooled = pool_stage(maps)
    assert pooled.shape == (2, shape[1] * side**2)
    assert side == min(shape[2:]) or shape[1] * (side + 1) ** 2 > 9600
    if side == 1:
        torch.testing.assert_close(pooled, maps.mean(dim=(2, 3)))


def test_pooling_averages_equal_blocks() -> None:
    pooled = pool_stage(torch.arange(16.0).reshape(1, 1, 4, 4), max_dims=8)
    assert pooled.tolist() == [[2.5, 4.5, 10.5, 12.5]]
    with pytest.raises(ValueError, match=r"\[B, C, H, W\]"):
        pool_stage(torch.zeros(3, 5))
