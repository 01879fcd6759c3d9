"""Comparing and aligning representations, beside what people would use instead."""

import warnings

import numpy as np
import torch
from race import Row, race


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


def similarity_scores() -> list[Row]:
    """One score of linear CKA and of mutual kNN against a plain float64 NumPy version."""
    from icmllab.toolbox.similarity import cka_linear, mutual_knn

    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, 1024, 128))
    A, B = torch.from_numpy(X), torch.from_numpy(Y)

    def plain_cka():
        P, Q = X - X.mean(0), Y - Y.mean(0)
        cross = np.linalg.norm(P.T @ Q) ** 2
        return cross / (np.linalg.norm(P.T @ P) * np.linalg.norm(Q.T @ Q))

    def plain_mknn(k=10):
        lists = []
        for Z in (X, Y):
            unit = Z / np.linalg.norm(Z, axis=1, keepdims=True)
            S = unit @ unit.T
            np.fill_diagonal(S, -np.inf)
            lists.append(np.argsort(-S, axis=1, kind="stable")[:, :k])
        shared = [len(set(a) & set(b)) for a, b in zip(*lists, strict=True)]
        return float(np.mean(shared)) / k

    return [
        Row("linear CKA, n=1024, d=128", "plain NumPy", *race(lambda: cka_linear(A, B), plain_cka),
            f"differs by {abs(cka_linear(A, B) - plain_cka()):.0e}"),
        Row("mutual kNN, n=1024, k=10", "plain NumPy", *race(lambda: mutual_knn(A, B), plain_mknn),
            f"differs by {abs(mutual_knn(A, B) - plain_mknn()):.0e}"),
    ]  # fmt: skip


def multiway_alignment() -> list[Row]:
    """GPA against a loop of SciPy's Procrustes, GCCA against cca-zoo's."""
    from scipy.linalg import orthogonal_procrustes

    from icmllab.representations.gcpa import synthetic_views
    from icmllab.toolbox.linalg import gcca, gpa

    views = [torch.as_tensor(X, dtype=torch.float64) for X in synthetic_views(400, 0).anchors]
    views = [X - X.mean(0) for X in views]
    arrays = [X.numpy() for X in views]
    rounds = 40

    def loop():
        def residual(m):
            return sum(
                np.sum((X @ orthogonal_procrustes(X, arrays[m])[0] - arrays[m]) ** 2)
                for X in arrays
            )

        U = arrays[min(range(len(arrays)), key=residual)]
        objective = 0.0
        for _ in range(rounds):
            turned = [X @ orthogonal_procrustes(X, U)[0] for X in arrays]
            U = np.mean(turned, axis=0)
            objective = sum(np.sum((A - U) ** 2) for A in turned)
        return objective

    def ours():
        return gpa(views, tol=0.0, max_iter=rounds, canonical=False).objective[-1]

    rows = [
        Row("GPA, 5 × (400, 64), 40 rounds", "SciPy Procrustes in a loop", *race(ours, loop),
            f"objective differs by {abs(ours() / loop() - 1):.0e}")
    ]  # fmt: skip
    try:
        from cca_zoo.linear import GCCA
    except ImportError:
        return rows

    def zoo():
        return GCCA(n_components=16, shrinkage=0.0, center=False).fit(arrays)

    def directions(scores):
        Q = np.linalg.qr(np.mean(scores, axis=0))[0]
        return Q

    mine = directions(
        [X @ W.numpy() for X, W in zip(arrays, gcca(views, 16, 0.0).weights, strict=True)]
    )
    other = directions([np.asarray(Z) for Z in zoo().transform(arrays)])
    angle = np.linalg.svd(mine.T @ other, compute_uv=False).min()
    rows.append(
        Row("GCCA, 5 × (400, 64), k=16", "cca-zoo GCCA", *race(lambda: gcca(views, 16, 0.0), zoo),
            f"smallest principal cosine {angle:.6f}")
    )  # fmt: skip
    return rows


def triplet_embedding() -> Row:
    """Fitting triplets by Adam against the straightforward autograd loop."""
    from icmllab.representations.dimension_collapse import fit_triplets, gaussian_instance
    from icmllab.toolbox.contrastive import triplet_accuracy

    n, d, steps = 200, 16, 100
    made = gaussian_instance(n, 32, 10_000, torch.Generator().manual_seed(0))
    triplets = made.triplets
    start = torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def ours():
        return fit_triplets(triplets, n, d, init=start, steps=steps)

    def theirs():
        X = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([X], lr=0.05)
        i, j, k = triplets.T
        for _ in range(steps):
            optimizer.zero_grad()
            gap = (X[i] - X[j]).square().sum(1) - (X[i] - X[k]).square().sum(1)
            torch.nn.functional.softplus(3 * gap).mean().backward()
            optimizer.step()
        return X.detach()

    mine, other = ours().accuracy, triplet_accuracy(theirs(), triplets)
    times = race(ours, theirs, rounds=3)
    said = f"accuracy {mine:.3f} and {other:.3f}"
    return Row("triplet embedding, m=10 000, 100 steps", "plain autograd", *times, said)


def vector_linking() -> Row:
    """Linking two stores from 20 seeds against POT's Gromov–Wasserstein, which needs none."""
    import ot

    from icmllab.representations.veclinking import (
        VectorLinker,
        kernel_encoders,
        link_metrics,
        make_problem,
    )

    problem = make_problem(kernel_encoders(250, 30, seed=0), n=150, overlap=100, n_seeds=20)
    X, Y = np.asarray(problem.X, dtype=float), np.asarray(problem.Y, dtype=float)

    def ours():
        return VectorLinker().fit(X, Y, seeds=problem.seeds).links_

    def theirs():
        C1, C2 = (ot.dist(Z, Z, metric="euclidean") for Z in (X, Y))
        p, q = ot.unif(len(X)), ot.unif(len(Y))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = ot.gromov.partial_gromov_wasserstein(C1, C2, p, q, m=100 / 150)
        best = plan.argmax(1)
        rows = np.flatnonzero(plan.max(1) > 0)
        return np.stack([rows, best[rows]], axis=1)

    scores = [link_metrics(f(), problem.truth, problem.seeds).f1 for f in (ours, theirs)]
    times = race(ours, theirs, rounds=3)
    said = f"F1 {scores[0]:.2f} and {scores[1]:.2f}"
    return Row("vector linking, 150 + 150, 20 seeds", "POT partial GW, no seeds", *times, said)


COMPARISONS = (
    calibrated_cka,
    calibrated_mknn,
    similarity_scores,
    multiway_alignment,
    triplet_embedding,
    vector_linking,
)
