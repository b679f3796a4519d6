"""The paper's equations, literally: loops over images, a full scan for every mean, float64. Slow, easy to check."""

from __future__ import annotations

import numpy as np

from odcluster.data.randomness import Purpose, uniforms


class LiteralMemories:
    def __init__(self, rows, labels, num_clusters, *, momentum, interval, threshold, seed):
        self.rows = rows.numpy().astype(np.float64)
        self.labels = labels.numpy().copy()
        self.num_clusters = num_clusters
        self.momentum, self.interval, self.threshold, self.seed = momentum, interval, threshold, seed
        self.centroids = np.stack([self.mean(c) for c in range(num_clusters)])
        self.recorded = set()
        self.events = 0

    def members(self, cluster):
        return [i for i in range(len(self.labels)) if self.labels[i] == cluster]

    def size(self, cluster):
        return len(self.members(cluster))

    def mean(self, cluster):
        return np.mean([self.rows[i] for i in self.members(cluster)], axis=0)

    def nearest(self, row, clusters):
        distances = [np.sum((row - self.centroids[c]) ** 2) for c in clusters]
        return clusters[int(np.argmin(distances))]

    def step(self, ids, features, step):
        """Steps 3 and 4 of an iteration, then the small clusters."""
        last = {int(i): f for i, f in zip(ids, features, strict=True)}  # the last occurrence of an image counts
        changed = 0
        for i, feature in last.items():
            f = np.array(feature, dtype=np.float64)
            self.rows[i] = self.momentum * f / np.sqrt(np.sum(f**2)) + (1 - self.momentum) * self.rows[i]
            old, new = self.labels[i], self.nearest(self.rows[i], range(self.num_clusters))
            if old != new:
                self.recorded |= {old, new}
                changed += 1
            self.labels[i] = new
        if (step + 1) % self.interval == 0:
            for c in self.recorded:
                if self.size(c) > 0:
                    self.centroids[c] = self.mean(c)
            self.recorded = set()
        self.small_clusters(step)
        return changed / len(last)

    def small_clusters(self, step):
        while small := [c for c in range(self.num_clusters) if self.size(c) <= self.threshold]:
            c = small[0]
            normal = [n for n in range(self.num_clusters) if self.size(n) > self.threshold]
            receivers = set()
            for i in self.members(c):
                self.labels[i] = self.nearest(self.rows[i], normal)
                receivers.add(self.labels[i])
            for receiver in receivers:
                self.centroids[receiver] = self.mean(receiver)
                self.recorded.discard(receiver)
            largest = max(range(self.num_clusters), key=lambda n: (self.size(n), -n))
            row_draw, half_draw = uniforms(self.seed, Purpose.SPLIT, step + 1, np.array([c]), 0, 2)[0]
            halves = self.two_means(self.members(largest), row_draw)
            for i in halves[1] if half_draw < 0.5 else halves[0]:
                self.labels[i] = c
            for half in (largest, c):
                self.centroids[half] = self.mean(half)
                self.recorded.discard(half)
            self.events += 1

    def two_means(self, members, draw):
        rows = [self.rows[i] for i in members]
        a = rows[int(draw * len(rows))]
        b = rows[int(np.argmax([np.sum((r - a) ** 2) for r in rows]))]
        side = [False] * len(rows)
        margin = list(range(len(rows)))
        for _ in range(20):
            if np.array_equal(a, b):
                break
            margin = [(np.sum((r - a) ** 2) - np.sum((r - b) ** 2)) / 2 for r in rows]
            new = [m > 0 for m in margin]
            if new == side:
                break
            side = new
            if all(side) or not any(side):
                break
            a = np.mean([r for r, s in zip(rows, side, strict=True) if not s], axis=0)
            b = np.mean([r for r, s in zip(rows, side, strict=True) if s], axis=0)
        least, size = self.threshold + 1, sum(side)
        if size in (0, len(rows)):
            size = len(rows) // 2
        elif size < least:
            size = least
        elif size > len(rows) - least:
            size = len(rows) - least
        if size != sum(side):
            chosen = set(sorted(range(len(rows)), key=lambda i: -margin[i])[:size])
            side = [i in chosen for i in range(len(rows))]
        return (
            [i for i, s in zip(members, side, strict=True) if not s],
            [i for i, s in zip(members, side, strict=True) if s],
        )
