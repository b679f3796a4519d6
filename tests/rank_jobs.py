"""What the tests of several ranks run on every rank: forked, or under torchrun as `rank_jobs.py JOB ARGUMENTS`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "clustering"))

from literal import LiteralMemories

from odcluster.clustering.balance import handle_small_clusters
from odcluster.clustering.kmeans import best_kmeans, kmeans
from odcluster.clustering.memory import CentroidsMemory, SamplesMemory
from odcluster.clustering.neighbours import nearest_neighbours
from odcluster.clustering.pca import pca_whiten
from odcluster.errors import UserError
from odcluster.ranks import Ranks, joined

CPU = torch.device("cpu")


def unit_rows(count, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=generator), dim=1)


def clustering() -> None:
    """Everything that clustering does across ranks equals what one process does with all rows."""
    with joined(CPU) as ranks:
        follow_the_literal_equations(ranks, 0)
        compare_with_one_process(ranks)
        count_bytes(ranks)
        identical_rows_are_split(ranks)


def follow_the_literal_equations(ranks: Ranks, seed: int) -> None:
    """As tests/clustering/test_memory.py does with one process."""
    num_samples, dim, num_clusters, batch, interval, threshold = 163, 6, 8, 24, 5, 5
    rows = unit_rows(num_samples, dim, seed)
    labels, _ = kmeans(rows, num_clusters, seed=seed)
    samples, centroids = filled(ranks, rows, labels, num_clusters)
    literal = LiteralMemories(
        rows, labels, num_clusters, momentum=0.5, interval=interval, threshold=threshold, seed=seed
    )
    random = np.random.default_rng(seed)
    handled = handle_small_clusters(samples, centroids, threshold, seed=seed, step=0)
    literal.small_clusters(-1)
    for step in range(60):
        ids = random.integers(0, num_samples, batch)  # with replacement: an image may stand twice in a batch
        features = random.normal(size=(batch, dim)) + 1.5 * np.eye(dim)[(step // 10) % dim]
        moves = samples.update(torch.from_numpy(ids), torch.from_numpy(features).float(), centroids.centroids)
        centroids.move(moves)
        if (step + 1) % interval == 0:
            centroids.refresh()
        handled += handle_small_clusters(samples, centroids, threshold, seed=seed, step=step + 1)
        change = literal.step(ids, features, step)
        assert samples.labels.tolist() == literal.labels.tolist(), f"step {step}"
        np.testing.assert_allclose(samples.rows, literal.rows[samples.own], atol=1e-5)
        np.testing.assert_allclose(centroids.centroids, literal.centroids, atol=1e-5)
        assert centroids.counts.tolist() == [literal.size(c) for c in range(num_clusters)]
        assert abs(float(moves.change_ratio()) - change) < 1e-6
    assert handled == literal.events > 0, "the test must have met small clusters"
    before = centroids.sums.clone()
    centroids.rebuild(samples)
    torch.testing.assert_close(centroids.sums, before, atol=1e-9, rtol=0)


def filled(ranks: Ranks, rows, labels, num_clusters):
    samples = SamplesMemory(*rows.shape, 0.5, ranks)
    centroids = CentroidsMemory(num_clusters, rows.shape[1], ranks)
    samples.rows.copy_(rows[samples.own])
    samples.labels.copy_(labels)
    centroids.fill(samples)
    return samples, centroids


def compare_with_one_process(ranks: Ranks) -> None:
    rows = unit_rows(301, 7, 3)
    own = ranks.own(len(rows))
    usable = torch.rand(len(rows), generator=torch.Generator().manual_seed(0)) > 0.1
    few = rows[torch.arange(301) % 5]  # five distinct rows for twelve clusters: empty ones have to be filled
    for table, kept in ((rows, None), (rows, usable), (few, None), (few, usable)):
        part = None if kept is None else kept[own]
        expected, centres = kmeans(table, 12, usable=kept, seed=4)
        labels, centroids = kmeans(table[own], 12, usable=part, seed=4, ranks=ranks)
        assert torch.equal(labels, expected[own])
        torch.testing.assert_close(centroids, centres)
        expected, centres = best_kmeans(table, 9, restarts=3, usable=kept)
        labels, centroids = best_kmeans(table[own], 9, restarts=3, usable=part, ranks=ranks)
        torch.testing.assert_close(centroids, centres)
        assert torch.equal(labels, expected[own])
    expected = nearest_neighbours(rows, 4, usable=usable)
    assert torch.equal(nearest_neighbours(rows[own], 4, usable=usable[own], ranks=ranks), expected[own])
    scaled = rows * torch.arange(1, 8) + 3
    torch.testing.assert_close(pca_whiten(scaled[own], 5, ranks), pca_whiten(scaled, 5)[own], atol=1e-4, rtol=1e-4)
    from odcluster.methods import odc

    assert odc.all_alike(rows[:1].expand(9, -1)[ranks.own(9)], torch.ones(9, dtype=torch.bool)[ranks.own(9)], ranks)
    assert not odc.all_alike(rows[own], usable[own], ranks)


def count_bytes(ranks: Ranks) -> None:
    """A step sends O(B D), and O(C D) more where centroids are refreshed; the number of images has no part in it."""
    dim, num_clusters, batch, interval = 16, 10, 24, 5
    size = ranks.world_size
    for num_samples in (500, 1000):
        rows = unit_rows(num_samples, dim, 0)
        samples, centroids = filled(ranks, rows, torch.arange(num_samples) % num_clusters, num_clusters)
        for step in range(20):
            ids = torch.from_numpy(np.random.default_rng(step).permutation(num_samples)[:batch])
            features = unit_rows(batch, dim, step)
            before = ranks.sent
            own = ranks.own(batch)
            gathered = ranks.gather(features[own], ranks.sizes(batch))
            assert torch.equal(gathered, features)
            centroids.move(samples.update(ids, gathered, centroids.centroids))
            ordinary = (size - 1) * (batch // size + 1) * dim * 4 + 2 * batch * 8
            assert 0 < ranks.sent - before <= ordinary, (ranks.sent - before, ordinary)
            if (step + 1) % interval == 0:
                before = ranks.sent
                recorded = int(centroids.recorded.sum())
                centroids.refresh()
                assert 0 < ranks.sent - before <= 2 * recorded * dim * 4 <= 2 * num_clusters * dim * 4


def identical_rows_are_split(ranks: Ranks) -> None:
    samples, centroids = filled(ranks, torch.ones(64, 3), torch.tensor([0] * 61 + [1, 2, 3]), 4)
    handle_small_clusters(samples, centroids, 7, seed=0, step=0)
    assert int(centroids.counts.min()) > 7
    torch.testing.assert_close(centroids.centroids, torch.ones(4, 3))


def train(arguments: str) -> None:
    """Runs one after the other: each [verb, data or run, out, options]."""
    import odcluster

    for verb, where, out, options in json.loads(arguments):
        if verb == "train":
            odcluster.train(where, out=out, quiet=True, **options)
        else:
            odcluster.resume(where, quiet=True, **(options or {}))


def verbs(arguments: str) -> None:
    """Commands one after the other, each a list of words."""
    from odcluster import cli

    for words in json.loads(arguments):
        try:
            cli.main(words)
        except SystemExit as ended:
            if ended.code:
                raise


def disagree(folder: str, run: str, options: str) -> None:
    """One rank's labels change by themselves."""
    import odcluster
    from odcluster.training.trainer import Trainer

    step = Trainer._train_step

    def corrupted(self, raw, epoch):
        step(self, raw, epoch)
        if self.step == 4 and self.ranks.rank == 1:
            self.method.samples.labels[3] = (self.method.samples.labels[3] + 1) % 6

    Trainer._train_step = corrupted  # type: ignore[method-assign]
    odcluster.train(folder, out=run, quiet=True, **json.loads(options))


def hurt(folder: str, run: str, options: str, what: str, rank: str, at: str) -> None:
    """One rank is killed, asked to stop, slow or frozen at a step (of the first attempt)."""
    from odcluster import cli
    from odcluster.training.trainer import Trainer

    step = Trainer._train_step

    def hurting(self, raw, epoch):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.step == int(at) and self.ranks.rank == int(rank) and first:
            if what == "slow":
                time.sleep(8)
            else:
                os.kill(os.getpid(), getattr(signal, what))
        step(self, raw, epoch)

    Trainer._train_step = hurting  # type: ignore[method-assign]
    flags = [
        word for name, value in json.loads(options).items() for word in (f"--{name}".replace("_", "-"), str(value))
    ]
    cli.main(["train", folder, "--out", run, *flags])


def refuse(folder: str, run: str) -> None:
    """What a user did wrong is told alike on all ranks, and nothing is left behind."""
    import odcluster

    for wrong in ({"batch_size": 2}, {"clusters": 90}):
        try:
            odcluster.train(folder, out=run, quiet=True, **wrong)
        except UserError as error:
            print(f"{os.environ['RANK']}: {error}", flush=True)
    assert not Path(run).exists()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
