"""Similarity scores: identities, invariances, closed forms, and independent libraries."""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from icmllab.toolbox import similarity as sim
from icmllab.toolbox.similarity import METRICS, expected_null_cka, expected_null_mknn, metric

NAMES = sorted(METRICS)
SYMMETRIC = [n for n in NAMES if n not in ("pwcca", "procrustes", "cycle_knn", "cknna")]
PARAMS = {"mutual_knn": {"k": 4}, "cycle_knn": {"k": 4}, "cknna": {"k": 6}}


def make(name):
    return metric(name, **PARAMS.get(name, {}))


def related(n=30, d_x=5, d_y=7, seed=0, noise=1.0):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d_x, generator=g, dtype=torch.float64)
    A = torch.randn(d_x, d_y, generator=g, dtype=torch.float64)
    return X, X @ A + noise * torch.randn(n, d_y, generator=g, dtype=torch.float64)


def rotation(d, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q


def permutations(n, count, seed=2):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=g) for _ in range(count)])


# What every metric obeys


@pytest.mark.parametrize("name", NAMES)
def test_a_representation_agrees_with_itself_completely(name):
    X, _ = related()
    assert make(name).raw(X, X) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_rotating_either_side_changes_nothing(name):
    X, Y = related()
    base = make(name).raw(X, Y)
    assert 0 < base < 1
    turned = make(name).raw(X @ rotation(5), Y @ rotation(7))
    # PWCCA weighs by the columns of X, so only Y may be rotated
    if name == "pwcca":
        turned = make(name).raw(X, Y @ rotation(7))
    assert turned == pytest.approx(base, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "procrustes"])
def test_scaling_either_side_changes_nothing(name):
    X, Y = related()
    assert make(name).raw(3 * X, 0.01 * Y) == pytest.approx(make(name).raw(X, Y), abs=1e-9)


@pytest.mark.parametrize("name", ["cka_linear", "cka_unbiased", "cka_rbf", "rsa", "cca_mean"])
def test_shifting_either_side_changes_nothing(name):
    X, Y = related()
    assert make(name).raw(X + 5, Y - 7) == pytest.approx(make(name).raw(X, Y), abs=1e-9)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_order_of_the_two_sides_does_not_matter(name):
    X, Y = related()
    assert make(name).raw(X, Y) == pytest.approx(make(name).raw(Y, X), abs=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_both_sides_together_is_the_identity(name):
    X, Y = related()
    perm = permutations(30, 1)[0]
    assert make(name).raw(X[perm], Y[perm]) == pytest.approx(make(name).raw(X, Y), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_null_equals_the_score_of_the_permuted_features(name):
    X, Y = related()
    perms = permutations(30, 5)
    found = make(name).null(make(name).prepare(X, Y), perms)
    expected = [make(name).raw(X, Y[perm]) for perm in perms]
    assert found.dtype == torch.float64
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_all_pairs_of_layers_at_once_equal_one_pair_at_a_time(name):
    Xs = [related(seed=s)[0] for s in (0, 1, 2)]
    Ys = [related(seed=s)[1] for s in (3, 4)]
    m, perms = make(name), permutations(30, 3)
    found = m.null_layers([m.side(X) for X in Xs], [m.side(Y) for Y in Ys], perms)
    assert found.shape == (3, 2, 3)
    for i, j in itertools.product(range(3), range(2)):
        expected = m.null(m.prepare(Xs[i], Ys[j]), perms)
        assert found[i, j].numpy() == pytest.approx(expected.numpy(), abs=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_input_of_every_kind_gives_the_same_score(name):
    X, Y = related()
    X, Y = X.float(), Y.float()
    expected = make(name).raw(X, Y)
    assert make(name).raw(X.double(), Y.double()) == expected
    assert make(name).raw(X.numpy(), Y.numpy()) == expected
    flipped = X.numpy()[::-1], Y.numpy()[::-1]
    assert make(name).raw(*flipped) == pytest.approx(expected, abs=1e-9)
    assert make(name).raw(X.requires_grad_(), Y) == expected


# CKNNA divides by self-terms of other masks and has no bound
@pytest.mark.parametrize("name", [n for n in NAMES if n != "cknna"])
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(8, 24),
    d_x=st.integers(2, 30),
    d_y=st.integers(2, 30),
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-3, 1e3),
)
def test_scores_never_exceed_one(name, n, d_x, d_y, seed, scale):
    X, Y = related(n, d_x, d_y, seed, noise=0.5)
    value = make(name).raw(scale * X, Y)
    assert math.isfinite(value)
    assert value <= 1 + 1e-9


# Each metric against something independent


def test_linear_cka_by_its_definition_and_in_both_forms():
    for d in (5, 60):
        X, Y = related(d_x=d)
        H = np.eye(30) - 1 / 30
        K, L = (H @ (Z @ Z.T).numpy() @ H for Z in (X, Y))
        expected = (K * L).sum() / (np.linalg.norm(K) * np.linalg.norm(L))
        assert sim.cka_linear(X, Y) == pytest.approx(expected, abs=1e-12)
        assert metric("cka_linear").raw(X, Y) == pytest.approx(expected, abs=1e-12)


def test_unbiased_cka_is_hsic1_written_out():
    X, Y = related()
    K, L = (Z @ Z.T for Z in (X, Y))
    n = 30
    Kt, Lt = (M.numpy() - np.diag(np.diag(M.numpy())) for M in (K, L))

    def hsic(A, B):
        one = np.ones(n)
        return (
            np.trace(A @ B)
            + (one @ A @ one) * (one @ B @ one) / ((n - 1) * (n - 2))
            - 2 * one @ A @ B @ one / (n - 2)
        ) / (n * (n - 3))

    expected = hsic(Kt, Lt) / math.sqrt(hsic(Kt, Kt) * hsic(Lt, Lt))
    assert sim.cka_unbiased(X, Y) == pytest.approx(expected, abs=1e-12)
    assert sim.hsic_unbiased(K, L) == pytest.approx(hsic(Kt, Lt), rel=1e-12)


def test_u_centred_gram_gives_hsic1_as_an_inner_product():
    X, Y = related(n=9)
    K, L = X @ X.T, Y @ Y.T
    inner = float((sim.u_centre(K) * sim.u_centre(L)).sum() / (9 * 6))
    assert inner == pytest.approx(sim.hsic_unbiased(K, L), rel=1e-12)
    assert sim.u_centre(K).sum(dim=1).numpy() == pytest.approx(np.zeros(9), abs=1e-10)


def test_hsic1_is_unbiased_over_all_pairings():
    X, Y = related(n=6)
    K, L = X @ X.T, Y @ Y.T
    values = [
        sim.hsic_unbiased(K, L[list(p)][:, list(p)]) for p in itertools.permutations(range(6))
    ]
    assert abs(np.mean(values)) < 1e-13 * np.abs(values).max()


def test_hsic1_reads_unsymmetric_matrices_in_the_stated_order():
    g = torch.Generator().manual_seed(0)
    K, L = torch.randn(2, 7, 7, generator=g, dtype=torch.float64)
    K.fill_diagonal_(0)
    L.fill_diagonal_(0)
    k, l = K.numpy(), L.numpy()
    expected = np.trace(k @ l) + k.sum() * l.sum() / 30 - 2 * (k @ l).sum() / 5
    assert sim.hsic_unbiased(K, L) == pytest.approx(expected / 28, rel=1e-12)


def test_rbf_cka_with_the_median_of_scipys_distances():
    for n in (8, 9):  # an even and an odd number of pairs
        X, Y = related(n=n)
        H = np.eye(n) - 1 / n
        grams = []
        for Z in (X, Y):
            d2 = scipy.spatial.distance.pdist(Z.numpy(), "sqeuclidean")
            K = np.exp(-scipy.spatial.distance.squareform(d2) / (2 * 0.25 * np.median(d2)))
            grams.append(H @ K @ H)
        K, L = grams
        expected = (K * L).sum() / (np.linalg.norm(K) * np.linalg.norm(L))
        assert sim.cka_rbf(X, Y, sigma_frac=0.5) == pytest.approx(expected, abs=1e-10)


def test_narrow_rbf_calls_unrelated_data_identical():
    g = torch.Generator().manual_seed(0)
    X, Y = torch.randn(2, 40, 64, generator=g, dtype=torch.float64)
    assert sim.cka_rbf(X, Y, sigma_frac=0.1) == pytest.approx(1.0, abs=1e-9)


def test_rsa_is_scipys_spearman_of_scipys_distances():
    X, Y = related()
    X = X.round()  # ties among the distances
    expected = scipy.stats.spearmanr(
        scipy.spatial.distance.pdist(X.numpy()), scipy.spatial.distance.pdist(Y.numpy())
    ).statistic
    assert sim.rsa(X, Y) == pytest.approx(expected, abs=1e-12)


def test_cca_is_the_mean_cosine_of_scipys_subspace_angles():
    X, Y = related()
    angles = scipy.linalg.subspace_angles((X - X.mean(0)).numpy(), (Y - Y.mean(0)).numpy())
    assert sim.cca_mean(X, Y) == pytest.approx(np.cos(angles).mean(), abs=1e-10)


def test_svcca_keeps_the_fewest_components_that_carry_the_variance():
    X, Y = related(noise=0.3)
    kept = []
    for Z in (X, Y):
        c = (Z - Z.mean(0)).numpy()
        u, s, _ = np.linalg.svd(c, full_matrices=False)
        m = int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), 0.8)) + 1
        kept.append(u[:, :m] * s[:m])
    assert kept[0].shape[1] < 5
    expected = np.cos(scipy.linalg.subspace_angles(*kept)).mean()
    assert sim.svcca(X, Y, var=0.8) == pytest.approx(expected, abs=1e-10)
    assert sim.svcca(X, Y, var=1.0) == pytest.approx(sim.cca_mean(X, Y), abs=1e-10)


def test_pwcca_weighs_correlations_by_scikit_learns_canonical_variates():
    from sklearn.cross_decomposition import CCA

    X, Y = related(d_x=3, d_y=4)
    scores = CCA(n_components=3, scale=False, max_iter=20000, tol=1e-14).fit_transform(
        X.numpy(), Y.numpy()
    )
    u, v = (s / np.linalg.norm(s, axis=0) for s in scores)
    alpha = np.abs(u.T @ (X - X.mean(0)).numpy()).sum(axis=1)
    expected = (alpha * (u * v).sum(axis=0)).sum() / alpha.sum()
    assert sim.pwcca(X, Y) == pytest.approx(expected, abs=1e-5)


def test_cca_is_one_for_any_data_when_a_rank_reaches_n_minus_one():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(12, 40, generator=g, dtype=torch.float64)
    Y = torch.randn(12, 3, generator=g, dtype=torch.float64)
    for score in (sim.cca_mean, sim.pwcca):
        assert score(X, Y) == pytest.approx(1.0, abs=1e-9)


def test_procrustes_by_scipys_best_rotation():
    for d in (6, 40):
        X, _ = related(d_x=d)
        Y = X @ rotation(d) + 0.3 * related(d_x=d, seed=5)[0]
        x, y = ((Z - Z.mean(0)).numpy() for Z in (X, Y))
        R, _ = scipy.linalg.orthogonal_procrustes(x, y)
        expected = 1 - np.linalg.norm(x @ R - y) / np.linalg.norm(y)
        assert sim.procrustes(X, Y) == pytest.approx(expected, abs=1e-9)
    assert sim.procrustes(100 * X, Y) < 0


def test_mutual_knn_by_scikit_learns_neighbours():
    X, Y = related()
    lists = []
    for Z in (X, Y):
        search = NearestNeighbors(n_neighbors=5, metric="cosine").fit(Z.numpy())
        lists.append(search.kneighbors(return_distance=False))
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(*lists, strict=True)]
    assert sim.mutual_knn(X, Y, k=5) == pytest.approx(np.mean(shared), abs=1e-12)


def test_neighbours_are_cosine_and_not_inner_product():
    X = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [50.0, 50.0], [-1.0, 0.0]]).double()
    assert sim.knn_indices(X, 1)[0, 0] == 1  # the inner product would pick the long row 3
    assert sim.nearest(X @ X.T, 1)[0, 0] == 3


def test_ties_go_to_the_lower_index():
    X = torch.tensor([[1.0, 0.2]] * 6 + [[-1.0, 0.3]]).double() / 3
    index = sim.knn_indices(X, 3)
    assert index.tolist()[:4] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert index[6].tolist() == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 40), st.integers(1, 64), st.integers(0, 10**6))
def test_duplicate_rows_tie_exactly_whatever_the_matrix_product_rounds(n, d, seed):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(n, d, generator=g, dtype=torch.float64)
    index = sim.knn_indices(torch.cat([base, base, base]), 2)
    for i in range(n):
        similar = torch.nn.functional.cosine_similarity(base[i], base, dim=1)
        if int((similar > 1 - 1e-9).sum()) == 1:  # in one dimension every positive row is the same
            assert index[i].tolist() == [i + n, i + 2 * n]
            assert index[i + n].tolist() == [i, i + 2 * n]


def test_ties_that_decide_who_is_a_neighbour_are_noticed():
    X, _ = related()
    gram = sim.cosines(X)
    assert not sim.ties_at_the_cut(gram, 4)
    doubled = sim.cosines(torch.cat([X, X, X]))
    assert sim.ties_at_the_cut(doubled, 1)  # one of two copies
    assert not sim.ties_at_the_cut(doubled, 2)  # both copies, and nothing else
    assert not sim.ties_at_the_cut(torch.ones(5, 5), 4)  # all others


@pytest.mark.parametrize("name", ["mutual_knn", "cycle_knn", "cknna"])
def test_an_order_breaks_the_ties_of_the_partner_and_changes_nothing_else(name):
    m = make(name)
    X, Y = related()
    order = permutations(30, 1, seed=8)[0]
    plain, ordered = m.prepare(X, Y), m.prepare(X, Y, order=order)
    perms = permutations(30, 4)
    assert torch.equal(m.null(plain, perms), m.null(ordered, perms))

    Y = Y[torch.arange(30) % 5]  # six copies of each row
    perm = perms[0]
    prepared = m.prepare(X, Y, order=order)
    # by hand: list the rows of Y in that order, so that the lower index is the earlier in it
    expected = m.raw(X[order], Y[order])
    renamed = m.pair(m.take(m.side(X), order), m.side(Y[order]))
    assert m.pair(prepared.a, prepared.b) == pytest.approx(renamed, abs=1e-12)
    if name == "mutual_knn":  # X has no ties: both readings are the same
        assert renamed == pytest.approx(expected, abs=1e-12)
    moved = m.pair(prepared.a, m.take(prepared.b, perm))
    assert float(m.null(prepared, perms)[0]) == pytest.approx(moved, abs=1e-12)


def test_a_zero_row_is_at_similarity_zero_to_all():
    X = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]]).double()
    assert sim.knn_indices(X, 2)[0].tolist() == [1, 2]
    assert sim.knn_indices(X, 3)[1].tolist() == [3, 0, 2]


def test_cycle_knn_by_its_definition_and_not_its_mirror():
    X, Y = related(noise=3.0)
    nx, ny = (sim.knn_indices(Z, 3).tolist() for Z in (X, Y))
    forward = np.mean([any(i in nx[j] for j in ny[i]) for i in range(30)])
    mirror = np.mean([any(i in ny[j] for j in nx[i]) for i in range(30)])
    assert sim.cycle_knn(X, Y, k=3) == pytest.approx(forward, abs=1e-12)
    assert sim.cycle_knn(Y, X, k=3) == pytest.approx(mirror, abs=1e-12)


def test_cknna_by_loops_over_its_definition():
    X, Y = related(n=14)
    n, k = 14, 5
    K, L = ((Z @ Z.T).numpy() for Z in (X, Y))

    def mask(G):
        M = np.zeros((n, n))
        for i in range(n):
            others = sorted((j for j in range(n) if j != i), key=lambda j: (-G[i, j], j))
            M[i, others[:k]] = 1
        return M

    def hsic(A, B):
        cross = A.sum(axis=0) @ B.sum(axis=1)
        total = A.sum() * B.sum() / ((n - 1) * (n - 2))
        return ((A * B.T).sum() + total - 2 * cross / (n - 2)) / (n * (n - 3))

    MK, ML = mask(K), mask(L)
    both = MK * ML
    expected = hsic(both * K, both * L) / math.sqrt(hsic(MK * K, MK * K) * hsic(ML * L, ML * L))
    assert sim.cknna(X, Y, k=k) == pytest.approx(expected, rel=1e-10)


def test_cknna_is_positive_on_unrelated_data():
    g = torch.Generator().manual_seed(0)
    X, Y = torch.randn(2, 64, 32, generator=g, dtype=torch.float64)
    null = metric("cknna", k=10).null(metric("cknna", k=10).prepare(X, Y), permutations(64, 60))
    assert 0.05 < float(null.mean()) < 0.25


# Closed forms


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_expected_null_cka_is_the_mean_over_every_permutation(d_x, d_y, seed):
    X, Y = related(6, d_x, d_y, seed)
    m = metric("cka_linear")
    every = torch.tensor(list(itertools.permutations(range(6))))
    mean = float(m.null(m.prepare(X, Y), every).mean())
    assert expected_null_cka(X, Y) == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_expected_null_mknn_is_the_mean_over_every_permutation(k):
    X, Y = related(6, 3, 4)
    m = metric("mutual_knn", k=k)
    every = torch.tensor(list(itertools.permutations(range(6))))
    mean = float(m.null(m.prepare(X, Y), every).mean())
    assert mean == pytest.approx(k / 5, abs=1e-12)
    assert expected_null_mknn(6, k) == k / 5


def test_expected_null_cka_of_gaussian_features_is_width_over_n_plus_width():
    g = torch.Generator().manual_seed(0)
    for d in (16, 128, 1024):
        X, Y = torch.randn(2, 200, d, generator=g, dtype=torch.float64)
        assert expected_null_cka(X, Y) == pytest.approx(d / (200 + d), abs=0.01)


# Local distances


def test_local_distances_by_loops_over_shared_directed_edges():
    X, Y = related(n=40, d_x=4, d_y=4, noise=0.5)
    nx, ny = (sim.knn_indices(Z, 5).tolist() for Z in (X, Y))
    pairs = sorted({tuple(sorted((i, j))) for i in range(40) for j in set(nx[i]) & set(ny[i])})
    dx, dy = ([float((Z[i] - Z[j]).norm()) for i, j in pairs] for Z in (X, Y))
    found = sim.shared_neighbour_distances(X, Y, k=5)
    assert len(found.x) == len(pairs) > 10
    expected = scipy.stats.spearmanr(dx, dy).statistic
    assert sim.local_distance_agreement(X, Y, k=5) == pytest.approx(expected, abs=1e-12)


def test_local_distance_agreement_is_nan_without_ten_pairs():
    X, Y = related(n=5)
    assert math.isnan(sim.local_distance_agreement(X, Y, k=1))


def test_local_distance_agreement_of_a_copy_is_one():
    X, _ = related()
    assert sim.local_distance_agreement(X, 2 * X, k=3) == pytest.approx(1.0)


# Errors


@pytest.mark.parametrize("name", [n for n in NAMES if "knn" not in n and n != "cknna"])
def test_a_constant_representation_is_refused(name):
    X, _ = related()
    with pytest.raises(ValueError, match="zero variance"):
        make(name).raw(X, torch.full((30, 3), 0.1))
    with pytest.raises(ValueError, match="zero variance"):
        make(name).raw(torch.full((30, 3), 1e6), X)


@pytest.mark.parametrize("name", ["cka_unbiased", "rsa"])
def test_rows_at_equal_distances_are_refused_and_not_scored_by_their_rounding(name):
    # all pairs of rows of an orthogonal matrix are equally far apart
    X, _ = related(n=24)
    for flat in (torch.eye(24), rotation(24), 1e-3 * rotation(24, seed=5) + 1):
        with pytest.raises(ValueError, match="zero variance: no variation left after centring"):
            make(name).raw(flat, X)
        with pytest.raises(ValueError, match="zero variance"):
            make(name).raw(X, flat)


@pytest.mark.parametrize("d", [3, 300])
def test_rsa_ranks_small_differences_of_near_and_of_far_rows(d):
    # both ways to compute a distance: from inner products (wide) and from differences (narrow)
    X, Y = related(n=20, d_x=d, d_y=d)
    Y[0] = Y[1] + 1e-7 * Y[2]
    expected = scipy.stats.spearmanr(
        scipy.spatial.distance.pdist(X.numpy()), scipy.spatial.distance.pdist(Y.numpy())
    ).statistic
    assert sim.rsa(X, Y) == pytest.approx(expected, abs=1e-12)
    Z = related(n=20, d_x=d, seed=9)[0]
    expected = scipy.stats.spearmanr(
        scipy.spatial.distance.pdist(X.numpy()), scipy.spatial.distance.pdist(Z.numpy())
    ).statistic
    assert sim.rsa(X, Z) == pytest.approx(expected, abs=1e-12)


def test_cka_linear_function_refuses_a_constant():
    with pytest.raises(ValueError, match="zero variance"):
        sim.cka_linear(torch.ones(8, 2), related(n=8)[0])


def test_rbf_refuses_data_whose_median_distance_is_zero():
    X = torch.zeros(9, 2).double()
    X[0] = 1
    with pytest.raises(ValueError, match="median"):
        sim.cka_rbf(X, X)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (torch.zeros(5), "2-D"),
        (torch.zeros(2, 5, 3), "2-D"),
        (torch.randn(3, 2), "at least 4 rows: got 3"),
        (torch.zeros(5, 0), "at least 1 column"),
        (torch.tensor([[1.0, float("nan")]] * 5), "finite"),
        (torch.tensor([[1.0, float("inf")]] * 5), "finite"),
        (torch.zeros(5, 2, dtype=torch.complex64), "real"),
        (np.array([["a", "b"]] * 5), "real"),
    ],
)
def test_bad_features_are_named(X, message):
    with pytest.raises(ValueError, match=f"X must.*{message}"):
        sim.cka_linear(X, torch.randn(5, 2))
    with pytest.raises(ValueError, match=f"Y must.*{message}"):
        sim.cka_linear(torch.randn(5, 2), X)


def test_unequal_rows_are_refused():
    with pytest.raises(ValueError, match="same number of rows: got 5 and 6"):
        sim.mutual_knn(torch.randn(5, 2), torch.randn(6, 2), k=2)


@pytest.mark.parametrize("k", [0, -1, 30, 2.5, True])
def test_neighbours_outside_one_to_n_minus_one_are_refused(k):
    X, Y = related()
    for score in (sim.mutual_knn, sim.cycle_knn, sim.cknna, sim.local_distance_agreement):
        with pytest.raises(ValueError, match="k must be"):
            score(X, Y, k=k)


def test_cknna_needs_two_neighbours():
    with pytest.raises(ValueError, match="k must be"):
        metric("cknna", k=1)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("cka", {}, "name must be one of"),
        ("cka_linear", {"k": 3}, "no parameter of cka_linear"),
        ("mutual_knn", {"sigma": 3}, "has: k"),
        ("cka_rbf", {"sigma_frac": 0}, "sigma_frac must be > 0"),
        ("cka_rbf", {"sigma_frac": math.nan}, "sigma_frac must be > 0"),
        ("svcca", {"var": 1.5}, "var must be in"),
        ("local_distance_agreement", {}, "local_distance_test"),
    ],
)
def test_bad_metrics_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        metric(name, **params)


def test_closed_forms_check_their_arguments():
    with pytest.raises(ValueError, match="n must"):
        expected_null_mknn(3, 1)
    with pytest.raises(ValueError, match="k must"):
        expected_null_mknn(6, 6)


def test_cknna_refuses_a_self_similarity_that_is_not_positive():
    # every row points at the same two rows: neighbours that are the same for all carry nothing
    X = torch.zeros(6, 2).double()
    with pytest.raises(ValueError, match="self-similarity"):
        sim.cknna(X, X, k=2)
