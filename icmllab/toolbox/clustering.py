"""Lloyd's k-means on many problems at once, and the steps that other clusterings share."""

from typing import Literal, NamedTuple

import torch

# scores held at a time: 1 MB of float32 stays in the cache
_SCORES = 1 << 18


class Assignment(NamedTuple):
    """The centroid of each row.

    Attributes:
        labels: (..., n) int64; equal distances go to the lowest index.
        squared_distance: (..., n), in the dtype of the rows.
    """

    labels: torch.Tensor
    squared_distance: torch.Tensor


class KMeansResult(NamedTuple):
    """Clusters; labels, counts and inertia belong to the centroids returned.

    Attributes:
        centroids: (..., k, d).
        labels: (..., n) int64.
        counts: (..., k) int64 rows of each; 0 for a cluster that stayed empty.
        inertia: (...) weighted sum of squared distances.
        n_iter: updates that were made.
        converged: (...) bool, whether the labels came to rest before ``max_iter``.
    """

    centroids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    inertia: torch.Tensor
    n_iter: int
    converged: torch.Tensor


def _as_rows(X: object) -> torch.Tensor:
    X = torch.as_tensor(X)
    if not X.is_floating_point():
        raise ValueError(f"X must be floating: got dtype {X.dtype}")
    if X.ndim < 2 or 0 in X.shape:
        raise ValueError(f"X must be (..., n, d), not empty: got shape {tuple(X.shape)}")
    # NaN comes through both, infinity through one
    if not all(bool(torch.isfinite(edge)) for edge in X.aminmax()):
        raise ValueError("X must be finite: it holds NaN or infinity")
    # half precision holds neither the sums nor the squares
    return X.float() if X.dtype in (torch.float16, torch.bfloat16) else X


def _as_weights(sample_weight: object, X: torch.Tensor) -> torch.Tensor | None:
    if sample_weight is None:
        return None
    weight = torch.as_tensor(sample_weight, dtype=X.dtype, device=X.device)
    try:
        weight = weight.expand(X.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"sample_weight must be {tuple(X.shape[:-1])}: got {tuple(weight.shape)}"
        ) from None
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise ValueError("sample_weight must be finite and >= 0")
    return weight


def _labels(X: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """(b, n) int64: argmin of ‖c‖²/2 − ⟨x, c⟩ for X (b, n, d), C (b, k, d)."""
    bias, Ct = C.square().sum(dim=-1)[:, None] / 2, C.transpose(1, 2)
    step = max(1, _SCORES // (X.shape[0] * C.shape[1]))
    if X.shape[0] == 1:
        parts = [
            torch.addmm(bias[0], x, Ct[0], alpha=-1).min(dim=1).indices for x in X[0].split(step)
        ]
        return torch.cat(parts)[None]
    parts = [torch.baddbmm(bias, x, Ct, alpha=-1).min(dim=2).indices for x in X.split(step, dim=1)]
    return torch.cat(parts, dim=1)


def _centred(X: torch.Tensor, C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both seen from the mean of C: far from the origin the expanded square loses its digits."""
    mean = C.mean(dim=1, keepdim=True)
    return X - mean, C - mean


def _squared(X: torch.Tensor, C: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(b, n) squared distances, from the differences themselves: exact 0 for a row met."""
    if len(X) == 1:
        return (X - C[0].index_select(0, labels[0])).square().sum(dim=-1)
    rows = C.gather(1, labels[..., None].expand_as(X))
    return (X - rows).square().sum(dim=-1)


def nearest_centroid(X: torch.Tensor, centroids: torch.Tensor) -> Assignment:
    """The nearest centroid of each row; no (n, k, d) tensor is formed.

    Args:
        X: (..., n, d).
        centroids: (..., k, d), of the same leading dimensions.

    Raises:
        ValueError: shapes that do not fit, or values that are not finite.
    """
    X = _as_rows(X)
    C = torch.as_tensor(centroids, dtype=X.dtype, device=X.device)
    if C.ndim != X.ndim or C.shape[:-2] != X.shape[:-2] or C.shape[-1] != X.shape[-1]:
        raise ValueError(
            f"centroids must be (..., k, {X.shape[-1]}) with the leading dimensions of X "
            f"{tuple(X.shape[:-2])}: got {tuple(C.shape)}"
        )
    C = _as_rows(C)
    flat, C = X.reshape(-1, *X.shape[-2:]), C.reshape(-1, *C.shape[-2:])
    labels = _labels(*_centred(flat, C))
    distances = _squared(flat, C, labels)
    return Assignment(labels.view(X.shape[:-1]), distances.view(X.shape[:-1]))


class ClusterSums(NamedTuple):
    """What a cluster's rows add up to.

    Attributes:
        sums: (..., k, d), Σ w x.
        weights: (..., k), Σ w.
    """

    sums: torch.Tensor
    weights: torch.Tensor


def cluster_sums(
    X: torch.Tensor,
    labels: torch.Tensor,
    n_clusters: int,
    sample_weight: torch.Tensor | None = None,
) -> ClusterSums:
    """Σ w x and Σ w of each cluster.

    Args:
        X: (..., n, d).
        labels: (..., n) int64 in [0, n_clusters).
        n_clusters: k.
        sample_weight: (..., n) >= 0; None means 1.

    Raises:
        ValueError: shapes or labels that do not fit, or values that are not finite.
    """
    X = _as_rows(X)
    if labels.shape != X.shape[:-1]:
        raise ValueError(f"labels must be {tuple(X.shape[:-1])}: got {tuple(labels.shape)}")
    if n_clusters < 1 or int(labels.min()) < 0 or int(labels.max()) >= n_clusters:
        raise ValueError(
            f"labels must be in [0, n_clusters={n_clusters}): "
            f"got {int(labels.min())} to {int(labels.max())}"
        )
    weight = _as_weights(sample_weight, X)
    flat = X.reshape(-1, *X.shape[-2:])
    weight = None if weight is None else weight.reshape(flat.shape[:2])
    found = _sums(flat, labels.reshape(flat.shape[:2]), n_clusters, weight)
    lead = X.shape[:-2]
    return ClusterSums(
        found.sums.view(*lead, n_clusters, X.shape[-1]), found.weights.view(*lead, n_clusters)
    )


def _cells(labels: torch.Tensor, k: int) -> torch.Tensor:
    """The number of each row's cluster when those of all problems are counted through."""
    if len(labels) == 1:
        return labels[0]
    return (labels + k * torch.arange(len(labels), device=labels.device)[:, None]).flatten()


def _counts(labels: torch.Tensor, k: int) -> torch.Tensor:
    """(b, k) int64 rows of each cluster."""
    return torch.bincount(_cells(labels, k), minlength=len(labels) * k).view(-1, k)


def _sums(
    X: torch.Tensor, labels: torch.Tensor, k: int, weight: torch.Tensor | None
) -> ClusterSums:
    b, _, d = X.shape
    at = _cells(labels, k)
    if weight is None:
        total = _counts(labels, k).to(X.dtype)
    else:
        X = X * weight[..., None]
        total = X.new_zeros(b * k).index_add_(0, at, weight.flatten())
    sums = X.new_zeros(b * k, d).index_add_(0, at, X.reshape(-1, d))
    return ClusterSums(sums.view(b, k, d), total.view(b, k))


def kmeans_plus_plus(
    X: torch.Tensor,
    n_clusters: int,
    *,
    sample_weight: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Rows to start from: each drawn in proportion to w·(squared distance to those chosen).

    Rows that differ from a chosen one by no more than rounding are not drawn while others are left;
    with fewer distinct rows than clusters the last are repeats.

    Args:
        X: (..., n, d).
        n_clusters: in [1, n].
        sample_weight: (..., n) >= 0, not all 0; None means 1.
        generator: source of randomness, on the device of X.

    Returns:
        (..., k) int64 row numbers.

    Raises:
        ValueError: sizes that do not fit, or values that are not finite.
    """
    X = _as_rows(X)
    _check_k(n_clusters, X)
    weight = _as_weights(sample_weight, X)
    flat = X.reshape(-1, *X.shape[-2:])
    weight = None if weight is None else weight.reshape(flat.shape[:2])
    chosen = _seed_rows(flat, n_clusters, weight, generator)
    return chosen.view(*X.shape[:-2], n_clusters)


def _check_k(n_clusters: int, X: torch.Tensor) -> None:
    if isinstance(n_clusters, bool) or not 1 <= n_clusters <= X.shape[-2]:
        raise ValueError(f"n_clusters must be in [1, n={X.shape[-2]}]: got {n_clusters}")


def _draw(mass: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """(b,) a column of (b, n) ``mass`` in proportion to it; the first where it is all 0."""
    edges = mass.double().cumsum(dim=1)
    u = torch.rand(len(mass), 1, dtype=torch.float64, device=mass.device, generator=generator)
    at = torch.searchsorted(edges, u * edges[:, -1:], right=True)[:, 0]
    # rounding may lead behind the last column that has mass
    last = (mass > 0).long() * torch.arange(mass.shape[1], device=mass.device)
    return torch.minimum(at, last.amax(dim=1))


def _seed_rows(
    X: torch.Tensor, k: int, weight: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    b, n, _ = X.shape
    weight = X.new_ones(b, n) if weight is None else weight
    if bool((weight.sum(dim=1) == 0).any()):
        raise ValueError("sample_weight must not be all 0")
    chosen = torch.empty(b, k, dtype=torch.int64, device=X.device)
    batch = torch.arange(b, device=X.device)
    X = X - X.mean(dim=1, keepdim=True)
    chosen[:, 0] = _draw(weight, generator)
    nearest = torch.full((b, n), torch.inf, dtype=X.dtype, device=X.device)
    squares = X.square().sum(dim=-1)
    for i in range(1, k):
        last = X[batch, chosen[:, i - 1]]
        products = torch.bmm(X, last[:, :, None])[..., 0]
        own = squares[batch, chosen[:, i - 1]]
        distance = (squares + own[:, None] - 2 * products).clamp_min_(0)
        # what the expanded square leaves of a repeat by rounding is no distance
        floor = 8 * torch.finfo(X.dtype).eps * (squares + own[:, None])
        distance = torch.where(distance > floor, distance, 0.0)
        nearest = torch.minimum(nearest, distance)
        chosen[:, i] = _draw(weight * nearest, generator)
    return chosen


def kmeans(
    X: torch.Tensor,
    n_clusters: int,
    *,
    init: Literal["kmeans++", "random"] | torch.Tensor = "kmeans++",
    max_iter: int = 15,
    tol: float = 0.0,
    empty: Literal["keep", "farthest"] = "keep",
    sample_weight: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> KMeansResult:
    """Lloyd's algorithm on each problem of a batch.

    A problem rests when no label changes, or when its inertia falls by less than ``tol`` of itself;
    it then waits for the others, so that a batch gives what its problems give one by one.

    Args:
        X: (..., n, d).
        n_clusters: k in [1, n].
        init: "kmeans++", "random" (distinct rows), or (..., k, d) centroids.
        max_iter: most updates; 0 keeps the start.
        tol: relative.
        empty: "keep" leaves an empty cluster where it was, its count is 0; "farthest" gives the m
            empty clusters the m rows farthest from their centroid (equal ones: lowest index first),
            which leave their old cluster unless they were alone in it.
        sample_weight: (..., n) >= 0; None means 1.
        generator: source of randomness of the start, on the device of X.

    Raises:
        ValueError: sizes or settings that do not fit, or values that are not finite.
    """
    rows = _as_rows(X)
    _check_k(n_clusters, rows)
    if max_iter < 0 or not tol >= 0:
        raise ValueError(f"max_iter and tol must be >= 0: got {max_iter} and {tol}")
    if empty not in ("keep", "farthest"):
        raise ValueError(f"empty must be 'keep' or 'farthest': got {empty!r}")
    lead, (n, d) = rows.shape[:-2], rows.shape[-2:]
    weight = _as_weights(sample_weight, rows)
    weight = None if weight is None else weight.reshape(-1, n)
    flat = rows.reshape(-1, n, d)
    C = _start(flat, n_clusters, init, weight, generator, lead)

    # scores are taken from the mean: far from the origin the expanded square loses its digits
    mean = flat.mean(dim=1, keepdim=True)
    near = flat - mean
    labels = _labels(near, C - mean)
    resting = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    inertia = _inertia(flat, C, labels, weight) if tol else None
    n_iter = 0
    while n_iter < max_iter and not bool(resting.all()):
        grouped = labels
        if empty == "farthest":
            grouped = _fill_empty(flat, C, labels, n_clusters)
        sums, mass = _sums(flat, grouped, n_clusters, weight)
        full = (mass > 0)[..., None] & ~resting[:, None, None]
        C = torch.where(full, sums / torch.where(mass > 0, mass, 1.0)[..., None], C)
        new = _labels(near, C - mean)
        n_iter += 1
        still = (new == labels).all(dim=1)
        if grouped is not labels:
            still &= (grouped == labels).all(dim=1)
        if tol:
            lower = _inertia(flat, C, new, weight)
            still |= inertia - lower <= tol * inertia
            inertia = lower
        resting, labels = resting | still, new
    counts = _counts(labels, n_clusters)
    return KMeansResult(
        C.view(*lead, n_clusters, d),
        labels.view(*lead, n),
        counts.view(*lead, n_clusters),
        _inertia(flat, C, labels, weight).view(lead),
        n_iter,
        resting.view(lead),
    )


def _inertia(X, C, labels, weight) -> torch.Tensor:
    squared = _squared(X, C, labels)
    return (squared if weight is None else weight * squared).sum(dim=1)


def _start(X, k, init, weight, generator, lead) -> torch.Tensor:
    if isinstance(init, torch.Tensor):
        if init.shape != (*lead, k, X.shape[-1]):
            raise ValueError(f"init must be {(*lead, k, X.shape[-1])}: got {tuple(init.shape)}")
        if not bool(torch.isfinite(init).all()):
            raise ValueError("init must be finite: it holds NaN or infinity")
        return init.to(X).reshape(-1, k, X.shape[-1]).clone()
    if init == "kmeans++":
        rows = _seed_rows(X, k, weight, generator)
    elif init == "random":
        u = torch.rand(X.shape[:2], dtype=torch.float64, device=X.device, generator=generator)
        rows = u.argsort(dim=1)[:, :k]
    else:
        raise ValueError(f"init must be 'kmeans++', 'random' or centroids: got {init!r}")
    return X.gather(1, rows[..., None].expand(-1, -1, X.shape[-1]))


def _fill_empty(X, C, labels, k) -> torch.Tensor:
    """Labels in which each empty cluster took a far row."""
    counts = _counts(labels, k)
    needy = (counts == 0).any(dim=1).nonzero()[:, 0].tolist()
    if not needy:
        return labels
    labels = labels.clone()
    squared = _squared(X, C, labels)
    for b in needy:  # few problems have an empty cluster, and few clusters are empty
        wanting = (counts[b] == 0).nonzero()[:, 0].tolist()
        members = counts[b].tolist()
        order = squared[b].sort(descending=True, stable=True).indices
        for i in order.tolist():
            if not wanting or float(squared[b, i]) == 0:
                break
            old = int(labels[b, i])
            if members[old] > 1:
                members[old] -= 1
                labels[b, i] = wanting.pop(0)
    return labels


def usage_perplexity(counts: torch.Tensor) -> torch.Tensor:
    """exp of the entropy of (..., k) counts: as many clusters, used alike, as these amount to."""
    share = counts.double() / counts.double().sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1).exp()
