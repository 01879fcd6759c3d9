"""``make bench``: the package beside what people would use instead, as ratios of one run.

A ratio above 1 says that the package is faster. Both sides do the same work on the same inputs on
one thread, alternating, and the median of several rounds counts. The last column compares results.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

ROUNDS = 5


class Row(NamedTuple):
    """One comparison: what, against what, the ratio of times, and how far results differ."""

    what: str
    beside: str
    ours: float
    theirs: float
    agreement: str

    @property
    def ratio(self) -> float:
        """Their time over ours."""
        return self.theirs / self.ours


def race(ours: Callable, theirs: Callable) -> tuple[float, float]:
    """Median seconds of two calls that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, kept in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            call()
            kept.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def calibrated_cka() -> Row:
    """A permutation test of linear CKA against SciPy's around the same metric."""
    from scipy.stats import permutation_test

    from icmllab.toolbox.similarity import cka_linear
    from icmllab.toolbox.two_sample import calibrate

    rng = np.random.default_rng(0)
    X = rng.normal(size=(256, 64))
    Y = np.concatenate([X[:, :8], rng.normal(size=(256, 56))], axis=1)
    index = np.arange(len(X))

    def statistic(order):
        return cka_linear(X[order], Y)

    def theirs():
        # SciPy permutes the index; the metric then sees the rows in that order
        return permutation_test(
            (index,),
            statistic,
            permutation_type="pairings",
            n_resamples=199,
            alternative="greater",
            vectorized=False,
            rng=np.random.default_rng(1),
        )

    def ours():
        return calibrate(X, Y, n_perm=199, generator=torch.Generator().manual_seed(1))

    gap = abs(ours().raw - theirs().statistic)
    return Row("calibrated linear CKA, n=256, B=199", "SciPy permutation_test", *race(ours, theirs),
               f"score differs by {gap:.0e}")  # fmt: skip


def calibrated_mknn() -> Row:
    """The null of mutual kNN against recomputing the neighbours for each permutation."""
    from sklearn.neighbors import NearestNeighbors

    from icmllab.toolbox.similarity import metric
    from icmllab.toolbox.two_sample import draw_permutations

    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, 512, 64))
    perms = draw_permutations(512, 99, generator=torch.Generator().manual_seed(0))
    chosen = metric("mutual_knn", k=10)

    def ours():
        return chosen.null(chosen.prepare(X, Y), perms).numpy()

    def neighbours(Z):
        found = NearestNeighbors(n_neighbors=11, metric="cosine").fit(Z).kneighbors(Z)[1]
        return found[:, 1:]

    def theirs():
        lists = neighbours(X)
        out = []
        for perm in perms.numpy():
            moved = neighbours(Y[perm])
            out.append(np.mean([len(np.intersect1d(*p)) for p in zip(lists, moved, strict=True)]))
        return np.array(out) / 10

    gap = np.abs(ours() - theirs()).max()
    return Row("null of mutual kNN, n=512, B=99", "scikit-learn, recomputed", *race(ours, theirs),
               f"scores differ by {gap:.0e}")  # fmt: skip


def optimizer_step() -> list[Row]:
    """A step of AdamWPower against torch's AdamW, without and with an eager power before it."""
    from icmllab.training.gradpower import AdamWPower, sign_power_

    def parameters():
        g = torch.Generator().manual_seed(0)
        made = [torch.nn.Parameter(torch.randn(256, 512, generator=g)) for _ in range(16)]
        for p in made:
            p.grad = torch.randn(p.shape, generator=g)
        return made

    rows = []
    for power in (1.0, 1.2):
        mine, others = parameters(), parameters()
        kept = [p.grad.clone() for p in others]
        ours = AdamWPower(mine, lr=1e-3, p=power)
        theirs = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

        def step_theirs(others=others, kept=kept, theirs=theirs, power=power):
            if power != 1.0:  # the power works in place: give it fresh gradients
                for p, grad in zip(others, kept, strict=True):
                    p.grad.copy_(grad)
                sign_power_(others, power)
            theirs.step()

        times = race(ours.step, step_theirs)
        gap = max((a - b).abs().max().item() for a, b in zip(mine, others, strict=True))
        name = "AdamW (foreach)" if power == 1.0 else "eager power, then AdamW"
        rows.append(
            Row(f"AdamWPower step, p={power}, 2 M", name, *times, f"parameters differ by {gap:.0e}")
        )
    return rows


def main() -> int:
    """Run every comparison and print the table."""
    torch.set_num_threads(1)
    rows = [calibrated_cka(), calibrated_mknn(), *optimizer_step()]
    print(f"{'what':<38}{'beside':<28}{'× faster':>9}  agreement")
    for row in rows:
        print(f"{row.what:<38}{row.beside:<28}{row.ratio:>9.2f}  {row.agreement}")
    slow = [row.what for row in rows if row.ratio < 0.9]
    if slow:
        print(f"slower than 0.9 ×: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
