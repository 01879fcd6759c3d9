r"""GSRQ: Gain-Shape Residual Quantization for Sub-1-bit KV Cache (arXiv 2607.01065).

A centroid is the average of vectors that point in different directions, and is therefore shorter
than they are. Short centroids are near everything: k-means sends most rows to a few of them, and
what is lost first is direction, on which attention depends. Gain-shape k-means chooses a codeword
by the inner product with a unit vector (its shape) and then gives it the best length (its gain).
Storage and decoding stay the same.

Known from the paper's abstract: residual quantisation below one bit an element, and that gain and
direction are learned apart. The exact updates, the weighting, the accounting of bits, all data and
all numbers are this book's reconstruction.

Notation: X (n, d) rows, w (n,) weights of rows, h (d,) weights of channels, codewords C_k = g_k s_k
with unit shapes s_k, K of them in each of M stages.
"""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClusterMixin, TransformerMixin, clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from icmllab.kernels.histogram_values import MAX_HEADS
from icmllab.kernels.histogram_values import histogram_values as code_histogram
from icmllab.kernels.lut_scores import lut_scores as table_scores
from icmllab.kernels.rq_encode import MAX_CODES, rq_encode
from icmllab.toolbox.clustering import (
    cluster_sums,
    kmeans_plus_plus,
    nearest_centroid,
    usage_perplexity,
)
from icmllab.toolbox.gpt import rope
from icmllab.toolbox.kv_cache import (
    AttentionError,
    KVBits,
    KVCache,
    PartialAttention,
    attend_partial,
    attention_error,
    mean_cosine,
    relative_mse,
)
from icmllab.toolbox.linalg import as_matrix
from icmllab.toolbox.quantization import quantize_groupwise

__all__ = [
    "SHIPPED",
    "EMAQuantizer",
    "GainShape",
    "GainShapeKMeans",
    "KVQuantizer",
    "Probe",
    "QuantizedKV",
    "ResidualQuantizer",
    "attention",
    "attention_output_error",
    "centroid_shrinkage",
    "check_beam",
    "check_gain",
    "check_gain_code",
    "check_gskm_step",
    "check_lut",
    "encode_beam",
    "gskm_assign",
    "gskm_update",
    "heavy_tailed",
    "histogram_values",
    "isotropic",
    "kv_like",
    "lut_scores",
    "mean_cosine",
    "quantizer_run",
    "relative_mse",
    "retrieval_probe",
    "retrieval_run",
    "scalar_run",
    "study_run",
    "topk_retrieval",
    "weighting_run",
]

TINY = 1e-12
"""A sum of members shorter than this share of their lengths has no direction."""

SMALL_ROW = 1e-6
"""A row below this share of the median length starts no codeword."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(name: str, X: object) -> torch.Tensor:
    """``X`` as a finite (n, d) tensor in float64, or else float32."""
    X = as_matrix(name, X).detach()
    return X if X.dtype == torch.float64 else X.float()


def _weights(name: str, w: object, size: int, like: torch.Tensor) -> torch.Tensor:
    """Positive weights (size,), all 1 for None."""
    if w is None:
        return like.new_ones(size)
    w = torch.as_tensor(w, dtype=like.dtype, device=like.device)
    if w.shape != (size,) or not bool((w > 0).all()) or not bool(torch.isfinite(w).all()):
        raise ValueError(f"{name} must be ({size},) positive finite numbers: got {w!r:.80}")
    return w


# --------------------------------------------------------------------------------------------
# Gain-shape k-means


class GainShape(NamedTuple):
    """Codewords as directions and lengths: C_k = gains_k · shapes_k.

    Attributes:
        shapes: (K, d) unit rows.
        gains: (K,) >= 0.
    """

    shapes: torch.Tensor
    gains: torch.Tensor


def gskm_assign(X: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    """The shape with the largest inner product: (n,) int64, the lowest index among equal ones.

    Multiplying a row by a positive number does not change its label.

    Args:
        X: (n, d).
        shapes: (K, d) unit rows.

    Raises:
        ValueError: shapes that do not fit.
    """
    if X.ndim != 2 or shapes.ndim != 2 or shapes.shape[1] != X.shape[1]:
        raise ValueError(
            f"X and shapes must be (n, d) and (K, d): got {tuple(X.shape)}, {tuple(shapes.shape)}"
        )
    return (X @ shapes.T).argmax(dim=1)


def gskm_update(
    X: torch.Tensor,
    labels: torch.Tensor,
    n_clusters: int,
    *,
    sample_weight: torch.Tensor | None = None,
    shape: str = "sum",
    gain: str = "projection",
    previous: torch.Tensor | None = None,
) -> GainShape:
    """Shapes and gains of a partition.

    With ``shape="sum"`` and ``gain="projection"`` the codeword of a cell is its weighted mean,
    exactly: the two algorithms differ in the assignment alone.

    Args:
        X: (n, d).
        labels: (n,) int64 in 0..n_clusters-1.
        n_clusters: K.
        sample_weight: (n,) > 0; None weighs all alike.
        shape: "sum" for s ∝ Σ w x, or "unit" for s ∝ Σ w x/‖x‖, the mean direction.
        gain: "projection" for Σ w⟨x, s⟩/Σ w, which is optimal for that shape; or "mean_norm", the
            mean length, a negative control that is far too long.
        previous: (K, d) shapes that cells without a direction keep; None leaves them zero.

    Raises:
        ValueError: an unknown option, or arguments that do not fit.
    """
    if shape not in ("sum", "unit"):
        raise ValueError(f"shape must be 'sum' or 'unit': got {shape!r}")
    if gain not in ("projection", "mean_norm"):
        raise ValueError(f"gain must be 'projection' or 'mean_norm': got {gain!r}")
    if X.ndim != 2:
        raise ValueError(f"X must be (n, d): got {tuple(X.shape)}")
    if previous is not None and previous.shape != (n_clusters, X.shape[1]):
        raise ValueError(
            f"previous must be ({n_clusters}, {X.shape[1]}): got {tuple(previous.shape)}"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64: got {labels.dtype}")
    w = _weights("sample_weight", sample_weight, len(X), X)
    sums, weights = cluster_sums(X, labels, n_clusters, w)
    lengths = X.norm(dim=1)
    total = X.new_zeros(n_clusters).index_add_(0, labels, w * lengths)  # Σ w‖x‖ of a cell
    direction, floor = sums, total
    if shape == "unit":
        unit = X / torch.where(lengths > 0, lengths, 1.0)[:, None]
        direction, floor = cluster_sums(unit, labels, n_clusters, w)
    size = direction.norm(dim=1)
    known = size > TINY * floor
    shapes = direction / torch.where(known, size, 1.0)[:, None]
    kept = torch.zeros_like(shapes) if previous is None else previous
    shapes = torch.where(known[:, None], shapes, kept)
    per = torch.where(weights > 0, weights, 1.0)
    gains = (sums * shapes).sum(dim=1) / per if gain == "projection" else total / per
    return GainShape(shapes, gains.clamp_min(0))


class GainShapeKMeans(ClusterMixin, TransformerMixin, BaseEstimator):
    """K-means whose assignment looks at direction: a drop-in for ``sklearn.cluster.KMeans``.

    Args:
        n_clusters: K.
        shape: "sum" or "unit", see :func:`gskm_update`.
        gain: "projection" or "mean_norm".
        init: "random" rows, "k-means++", or (K, d) codewords.
        n_init: starts, of which the best alignment is kept.
        max_iter: rounds.
        tol: relative gain in alignment below which it stops.
        random_state: seed of the starts; None is 0.
        spare: what to do with fewer than K different rows: "error", or "unused" to leave codewords
            over with a warning.

    Attributes:
        cluster_centers_: (K, d) codewords, in the space of X.
        shapes_: (K, d) unit rows, in the metric X∘√h when channels are weighted.
        gains_: (K,).
        labels_: (n,) int64, the last partition, which shapes and gains belong to.
        inertia_: Σ w‖x − C‖² over that partition, in the metric.
        alignment_history_: Σ w⟨x, s⟩ after each round; it never decreases.
        n_iter_: rounds, the one that repeated the assignment included.
        usage_perplexity_: exp of the entropy of the cells' shares, at most K.
    """

    def __init__(
        self,
        n_clusters: int = 256,
        *,
        shape: str = "sum",
        gain: str = "projection",
        init: object = "random",
        n_init: int = 1,
        max_iter: int = 25,
        tol: float = 1e-5,
        random_state: int | None = None,
        spare: str = "error",
    ):
        self.n_clusters = n_clusters
        self.shape = shape
        self.gain = gain
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.spare = spare

    def fit(self, X, y=None, sample_weight=None, channel_weight=None):
        """Fit to rows.

        Args:
            X: (n, d) array or tensor; float64 is computed in float64, all else in float32.
            y: ignored.
            sample_weight: (n,) > 0.
            channel_weight: h (d,) > 0, of the metric Σ_j h_j (x_j − c_j)².

        Raises:
            ValueError: options out of range, input that is not finite and 2-D, weights that are
                not positive, or more clusters than different rows that are not zero.

        Warns:
            ConvergenceWarning: some codewords end unused.
        """
        X = _rows("X", X)
        for name in ("n_clusters", "n_init", "max_iter"):
            value = getattr(self, name)
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1: got {value!r}")
        if self.spare not in ("error", "unused"):
            raise ValueError(f"spare must be 'error' or 'unused': got {self.spare!r}")
        w = _weights("sample_weight", sample_weight, len(X), X)
        root = _weights("channel_weight", channel_weight, X.shape[1], X).sqrt()
        Z = X * root
        generator = _generator(0 if self.random_state is None else self.random_state)
        best = max(
            (self._run(Z, w, root, generator) for _ in range(self.n_init)),
            key=lambda run: run[3][-1],
        )
        self.shapes_, self.gains_, self.labels_, history, self.n_iter_, self.barred_ = best
        self.alignment_history_ = np.array(history)
        self.cluster_centers_ = self.gains_[:, None] * self.shapes_ / root
        self.channel_root_ = root
        rest = Z - (self.gains_[:, None] * self.shapes_)[self.labels_]
        self.inertia_ = float((w * rest.square().sum(dim=1)).double().sum())
        counts = torch.bincount(self.labels_, minlength=self.n_clusters)
        self.usage_perplexity_ = float(usage_perplexity(counts.double()))
        self.n_features_in_ = X.shape[1]
        used = int((counts > 0).sum())
        if used < self.n_clusters:
            warnings.warn(
                f"{used} of {self.n_clusters} codewords are used",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _start(
        self, Z: torch.Tensor, w: torch.Tensor, root: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """(K, d) unit shapes, and how many of them are no spare ones."""
        K = self.n_clusters
        if not isinstance(self.init, str):
            C = _rows("init", self.init).to(Z)
            if C.shape != (K, Z.shape[1]):
                raise ValueError(f"init must be ({K}, {Z.shape[1]}): got {tuple(C.shape)}")
            C = C * root
            size = C.norm(dim=1, keepdim=True)
            if not bool((size > 0).all()):
                raise ValueError("init must hold no zero row: a zero has no direction")
            return C / size, K
        if self.init not in ("random", "k-means++"):
            raise ValueError(f"init must be 'random', 'k-means++' or an array: got {self.init!r}")
        size = Z.norm(dim=1)
        rows = torch.nonzero(size > SMALL_ROW * size.median())[:, 0]
        # equal rows have equal projections; different ones differ, but for an accident
        v = torch.randn(Z.shape[1], generator=_generator(1), dtype=torch.float64).to(Z.device)
        order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
        _, inverse = torch.unique(Z[order].double() @ v, return_inverse=True)
        first = torch.full((len(order),), len(order), device=Z.device)
        places = torch.arange(len(order), device=Z.device)
        first = first.scatter_reduce(0, inverse, places, "amin")
        distinct = order[first[first < len(order)].sort().values]
        found = min(K, len(distinct))
        if found < K and self.spare == "error":
            raise ValueError(
                f"n_clusters must be at most the number of different rows that are not zero, "
                f"{len(distinct)}: got {K}"
            )
        if self.init == "k-means++" and found == K:
            chosen = distinct[
                kmeans_plus_plus(Z[distinct], K, sample_weight=w[distinct], generator=generator)
            ]
        else:
            chosen = distinct[:found]
        shapes = Z.new_zeros(K, Z.shape[1])
        shapes[:found] = Z[chosen] / size[chosen, None]
        return shapes, found

    def _run(self, Z, w, root, generator):
        shapes, found = self._start(Z, w, root, generator)
        K = self.n_clusters
        bias = Z.new_zeros(K)
        bias[found:] = -math.inf  # spare codewords are never chosen
        gains, labels, history, done = Z.new_zeros(K), None, [], 0
        while done < self.max_iter:
            done += 1
            new = torch.addmm(bias, Z, shapes.T).argmax(dim=1)
            if labels is not None and torch.equal(new, labels):
                break
            labels = new
            shapes, gains = gskm_update(
                Z,
                labels,
                K,
                sample_weight=w,
                shape=self.shape,
                gain=self.gain,
                previous=shapes,
            )
            history.append(float((w * (Z * shapes[labels]).sum(dim=1)).double().sum()))
            if len(history) > 1 and history[-1] - history[-2] < self.tol * abs(history[-2]):
                break
            if done < self.max_iter:
                shapes, gains = self._fill(Z, shapes, gains, labels, found)
        return shapes, gains, labels, history, done, bias

    @staticmethod
    def _fill(Z, shapes, gains, labels, found):
        """Empty cells take the rows that their codewords leave most of."""
        counts = torch.bincount(labels, minlength=len(shapes))[:found]
        empty = torch.nonzero(counts == 0)[:, 0]
        if not len(empty):
            return shapes, gains
        rest = (Z - gains[labels, None] * shapes[labels]).norm(dim=1)
        worst = rest.argsort(descending=True, stable=True)[: len(empty)]
        size = Z[worst].norm(dim=1)
        good = size > 0
        shapes, gains = shapes.clone(), gains.clone()
        shapes[empty[good]] = Z[worst[good]] / size[good, None]
        gains[empty[good]] = size[good]
        return shapes, gains

    def _checked(self, X) -> torch.Tensor:
        if not hasattr(self, "shapes_"):
            raise NotFittedError("call fit before predict or transform")
        X = _rows("X", X)
        if X.shape[1] != self.n_features_in_:
            raise ValueError(f"X must have {self.n_features_in_} columns: got {X.shape[1]}")
        return X.to(self.shapes_) * self.channel_root_

    def predict(self, X) -> torch.Tensor:
        """Labels of rows by the final shapes: (n,) int64."""
        Z = self._checked(X)
        return torch.addmm(self.barred_, Z, self.shapes_.T).argmax(dim=1)

    def transform(self, X) -> torch.Tensor:
        """Inner products with the shapes: (n, K)."""
        return self._checked(X) @ self.shapes_.T


# --------------------------------------------------------------------------------------------
# Baselines


class EMAQuantizer(ClusterMixin, BaseEstimator):
    """Vector quantisation by exponential moving averages, as in VQ-VAE.

    Args:
        n_clusters: K.
        decay: of the averages, in (0, 1).
        batch_size: rows a step.
        epochs: passes.
        random_state: seed; None is 0.
    """

    def __init__(
        self,
        n_clusters: int = 256,
        *,
        decay: float = 0.9,
        batch_size: int = 512,
        epochs: int = 12,
        random_state: int | None = None,
    ):
        self.n_clusters = n_clusters
        self.decay = decay
        self.batch_size = batch_size
        self.epochs = epochs
        self.random_state = random_state

    def fit(self, X, y=None, sample_weight=None, channel_weight=None):
        """Fit to rows (n, d); weights are not used."""
        X = _rows("X", X)
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must be in (0, 1): got {self.decay}")
        g = _generator(0 if self.random_state is None else self.random_state)
        C = X[torch.randperm(len(X), generator=g)[: self.n_clusters]].clone()
        if len(C) < self.n_clusters:
            raise ValueError(f"n_clusters must be at most the {len(X)} rows: got {self.n_clusters}")
        sums, counts = C.clone(), C.new_ones(len(C))
        for _ in range(self.epochs):
            for rows in torch.randperm(len(X), generator=g).split(self.batch_size):
                labels = nearest_centroid(X[rows], C).labels
                new, weight = cluster_sums(X[rows], labels, len(C))
                sums = self.decay * sums + (1 - self.decay) * new
                counts = self.decay * counts + (1 - self.decay) * weight
                C = sums / counts.clamp_min(1e-5)[:, None]
        self.cluster_centers_ = C
        self.labels_ = nearest_centroid(X, C).labels
        return self

    def predict(self, X) -> torch.Tensor:
        """The nearest centroid: (n,) int64."""
        return nearest_centroid(
            _rows("X", X).to(self.cluster_centers_), self.cluster_centers_
        ).labels


# --------------------------------------------------------------------------------------------
# Residual quantisation


class ResidualQuantizer:
    """M stages, each of which codes what the ones before have left.

    Args:
        n_stages: M.
        n_clusters: K <= 256, so that a code is a byte.
        kmeans: "gskm", "lloyd" for scikit-learn's KMeans from random rows, or an estimator with
            ``cluster_centers_``, which is cloned and given the seed.
        beam: rows keep this many partial codes; 1 is greedy.
        random_state: seed.
        max_iter: rounds of a stage, for the named ones.
        starts: "same" gives each stage the same seed, so that the rows that start it are the same
            ones, whose codewords serve them well and which leave little over: k-means is better for
            it by far. "new" draws others, by ``random_state`` plus the number of the stage.

    Attributes:
        codebooks_: (M, K, d) codewords.
        shapes_, bias_: (M, K, d) and (M, K): a stage takes the largest ⟨r, s_k⟩ + b_k.
        stages_: the fitted estimators.
        residual_: (n, d) what the training rows leave over.

    Raises:
        ValueError: sizes out of range.
    """

    def __init__(
        self,
        n_stages: int,
        n_clusters: int = 256,
        *,
        kmeans: object = "gskm",
        beam: int = 1,
        random_state: int = 0,
        max_iter: int = 12,
        starts: str = "same",
    ):
        for name, value in (("n_stages", n_stages), ("n_clusters", n_clusters), ("beam", beam)):
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1: got {value!r}")
        if n_clusters > MAX_CODES:
            raise ValueError(
                f"n_clusters must be at most {MAX_CODES}, codes are bytes: got {n_clusters}"
            )
        if starts not in ("same", "new"):
            raise ValueError(f"starts must be 'same' or 'new': got {starts!r}")
        self.n_stages, self.n_clusters, self.beam = n_stages, n_clusters, beam
        self.random_state, self.max_iter = random_state, max_iter
        self.kmeans, self.starts = kmeans, starts
        self._estimator(0)

    def _estimator(self, stage: int):
        """The estimator of a stage, not yet fitted."""
        from sklearn.cluster import KMeans

        named = {
            "gskm": lambda: GainShapeKMeans(max_iter=self.max_iter),
            "lloyd": lambda: KMeans(init="random", n_init=1, max_iter=self.max_iter),
        }
        if isinstance(self.kmeans, str):
            if self.kmeans not in named:
                raise ValueError(
                    f"kmeans must be one of {', '.join(named)} or an estimator: got {self.kmeans!r}"
                )
            made = named[self.kmeans]()
        else:
            made = clone(self.kmeans)
        seed = self.random_state + (stage if self.starts == "new" else 0)
        options = {"n_clusters": self.n_clusters, "random_state": seed}
        if stage and isinstance(made, GainShapeKMeans):
            options["spare"] = "unused"  # what is left over may be zero
        return made.set_params(**options)

    def fit(self, X, sample_weight=None, channel_weight=None) -> "ResidualQuantizer":
        """Fit all stages, one after the other, to the rows that each leaves over.

        Any estimator serves a metric: it sees X∘√h, and its centres are divided by √h.

        Args:
            X: (n, d).
            sample_weight: (n,) > 0.
            channel_weight: h (d,) > 0, of the metric Σ_j h_j (x_j − c_j)².

        Raises:
            ValueError: as the estimators.
        """
        X = _rows("X", X)
        h = _weights("channel_weight", channel_weight, X.shape[1], X)
        w = None if sample_weight is None else _weights("sample_weight", sample_weight, len(X), X)
        self.stages_, shapes, biases, words = [], [], [], []
        r, root = X.clone(), h.sqrt()
        for stage in range(self.n_stages):
            made = self._estimator(stage)
            Z = (r * root).cpu().numpy()
            made.fit(Z, sample_weight=None if w is None else w.cpu().numpy())
            C = torch.as_tensor(made.cluster_centers_).to(X) / root
            if isinstance(made, GainShapeKMeans):
                s, b = made.shapes_.to(X) * root, made.barred_.to(X)
            else:  # ‖r − c‖² is least where ⟨r, c⟩ − ‖c‖²/2 is largest
                s, b = C * h, -(C.square() * h).sum(dim=1) / 2
            r = rq_encode(r, s[None], b[None], C[None]).residual
            self.stages_.append(made)
            shapes.append(s)
            biases.append(b)
            words.append(C)
        self.shapes_, self.bias_, self.codebooks_ = (
            torch.stack(part) for part in (shapes, biases, words)
        )
        self.channel_weight_, self.residual_ = h, r
        return self

    def encode(self, X) -> torch.Tensor:
        """Codes of rows: (n, M) uint8."""
        X = self._checked("X", X)
        if self.beam > 1:
            return encode_beam(X, self, self.beam)
        return rq_encode(X, self.shapes_, self.bias_, self.codebooks_, residual=False).codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Sums of codewords: (n, d) in the dtype of the codebooks."""
        if codes.ndim != 2 or codes.shape[1] != self.n_stages or codes.dtype != torch.uint8:
            raise ValueError(
                f"codes must be (n, {self.n_stages}) uint8: got {tuple(codes.shape)} {codes.dtype}"
            )
        if len(codes) and int(codes.max()) >= self.n_clusters:
            raise ValueError(f"codes must be below {self.n_clusters}: got {int(codes.max())}")
        out = self.codebooks_.new_zeros(len(codes), self.codebooks_.shape[2])
        for m, words in enumerate(self.codebooks_):
            out += words[codes[:, m].long()]
        return out

    def _checked(self, name: str, X) -> torch.Tensor:
        if not hasattr(self, "codebooks_"):
            raise NotFittedError("call fit before encode")
        X = _rows(name, X)
        if X.shape[1] != self.codebooks_.shape[2]:
            raise ValueError(
                f"{name} must have {self.codebooks_.shape[2]} columns: got {X.shape[1]}"
            )
        return X.to(self.codebooks_)

    @property
    def bits_per_element(self) -> float:
        """M log₂ K / d, without anything beside the codes."""
        return self.n_stages * math.log2(self.n_clusters) / self.codebooks_.shape[2]


def encode_beam(X: torch.Tensor, quantizer: ResidualQuantizer, beam: int) -> torch.Tensor:
    """Codes by beam search, never worse than greedy: (n, M) uint8.

    In each stage a row's ``beam`` partial codes are extended by every codeword, and those with the
    smallest residuals survive. At the end the greedy code stays where it is better.

    Args:
        X: (n, d).
        quantizer: fitted.
        beam: >= 1.
    """
    q, h = quantizer, quantizer.channel_weight_
    n, K = len(X), q.n_clusters
    rest, codes = X[:, None], X.new_zeros(n, 1, 0, dtype=torch.uint8)
    rows = torch.arange(n, device=X.device)[:, None]
    barred = torch.zeros(n, 1, dtype=torch.bool, device=X.device)  # partial codes not allowed
    for words, bias in zip(q.codebooks_, q.bias_, strict=True):
        # ‖r − c‖² = ‖r‖² − 2⟨r, c⟩ + ‖c‖², in the metric
        gap = (rest.square() * h).sum(dim=2, keepdim=True) - 2 * (rest * h) @ words.T
        gap = gap + (words.square() * h).sum(dim=1)
        gap = gap.masked_fill(bias.isinf() | barred[..., None], math.inf).flatten(1)
        found = gap.topk(min(beam, gap.shape[1]), dim=1, largest=False)
        best, barred = found.indices, found.values.isinf()
        parent, code = best // K, best % K
        rest = rest[rows, parent] - words[code]
        codes = torch.cat([codes[rows, parent], code[..., None].to(torch.uint8)], dim=2)
    greedy = rq_encode(X, q.shapes_, q.bias_, q.codebooks_)
    mine, theirs = ((r.square() * h).sum(dim=1) for r in (rest[:, 0], greedy.residual))
    return torch.where(((mine < theirs) & ~barred[:, 0])[:, None], codes[:, 0], greedy.codes)


# --------------------------------------------------------------------------------------------
# The cache


def _sizes(codes: torch.Tensor, codebooks: torch.Tensor) -> tuple[int, int, int, int]:
    """(G, M, K, width) of codebooks that fit the codes."""
    if codebooks.ndim != 4:
        raise ValueError(f"codebooks must be (G, M, K, d/G): got {tuple(codebooks.shape)}")
    if codes.ndim != 3 or codes.shape[1:] != codebooks.shape[:2]:
        G, M = codebooks.shape[:2]
        raise ValueError(f"codes must be (n, {G}, {M}): got {tuple(codes.shape)}")
    return tuple(codebooks.shape)


def lut_scores(
    q: torch.Tensor, codes: torch.Tensor, codebooks: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Inner products of queries with coded keys, none of which is decoded: (h, n).

    Args:
        q: (h, d).
        codes: (n, G, M) uint8.
        codebooks: (G, M, K, d/G).
        scale: (n,) of the tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    G, M, K, width = _sizes(codes, codebooks)
    if q.ndim != 2 or q.shape[1] != G * width:
        raise ValueError(f"q must be (h, {G * width}): got {tuple(q.shape)}")
    lut = torch.einsum("hgw,gmkw->hgmk", q.reshape(len(q), G, width), codebooks)
    return table_scores(
        lut.reshape(len(q), G * M, K).contiguous(), codes.reshape(len(codes), G * M), scale
    )


def histogram_values(
    p: torch.Tensor, codes: torch.Tensor, codebooks: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Weighted sums of coded values, none of which is decoded: (h, d).

    Args:
        p: (h, n) weights.
        codes: (n, G, M) uint8.
        codebooks: (G, M, K, d/G).
        scale: (n,) of the tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    G, M, K, width = _sizes(codes, codebooks)
    if p.ndim != 2 or p.shape[1] != len(codes):
        raise ValueError(f"p must be (h, {len(codes)}): got {tuple(p.shape)}")
    flat = codes.reshape(len(codes), G * M)
    parts = [code_histogram(rows, flat, scale, K) for rows in p.split(MAX_HEADS)]
    b = torch.cat(parts).reshape(len(p), G, M, K)
    return torch.einsum("hgmk,gmkw->hgw", b, codebooks).reshape(len(p), G * width)


def _token_scale(x: torch.Tensor) -> torch.Tensor:
    """ρ = ‖x‖/√d rounded to float16, in the dtype of x; 0 for zero rows."""
    rho = x.norm(dim=-1) / math.sqrt(x.shape[-1])
    if bool((rho > torch.finfo(torch.float16).max).any()):
        raise ValueError("x must have token scales that fit float16: one is too large")
    return rho.half().to(x.dtype)


class KVQuantizer:
    """Codebooks of keys and values, for each KV head and group of channels.

    Args:
        head_dim: d.
        group_dim: channels of a group; must divide ``head_dim``. None takes min(64, head_dim).
        n_stages: M; a group costs 8 M bits with 256 codewords.
        n_clusters: K.
        token_scale: divide each token by ρ = ‖x‖/√d, stored in float16.
        sinks: first tokens in full precision.
        window: last tokens in full precision.
        kmeans: as for :class:`ResidualQuantizer`, and so are ``beam`` and ``random_state``.
        rope_keys: "after": keys come with their rotation; "before": they come without it, and
            the cache rotates what it gives back.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        head_dim: int,
        group_dim: int | None = None,
        n_stages: int = 8,
        *,
        n_clusters: int = 256,
        token_scale: bool = True,
        sinks: int = 4,
        window: int = 32,
        kmeans: object = "gskm",
        beam: int = 1,
        random_state: int = 0,
        rope_keys: str = "after",
    ):
        group_dim = min(64, head_dim) if group_dim is None else group_dim
        if head_dim < 1 or group_dim < 1 or head_dim % group_dim:
            raise ValueError(
                f"group_dim must divide head_dim: got group_dim={group_dim}, head_dim={head_dim}"
            )
        for name, value in (("sinks", sinks), ("window", window)):
            if isinstance(value, bool) or value != int(value) or value < 0:
                raise ValueError(f"{name} must be a whole number >= 0: got {value!r}")
        if rope_keys not in ("after", "before"):
            raise ValueError(f"rope_keys must be 'after' or 'before': got {rope_keys!r}")
        self.head_dim, self.group_dim = head_dim, group_dim
        self.n_groups = head_dim // group_dim
        self.n_stages, self.n_clusters = n_stages, n_clusters
        self.token_scale, self.sinks, self.window = token_scale, sinks, window
        self.rope_keys = rope_keys
        self._made = lambda: ResidualQuantizer(
            n_stages, n_clusters, kmeans=kmeans, beam=beam, random_state=random_state
        )
        self._made()

    def fit(
        self,
        K: torch.Tensor,
        V: torch.Tensor,
        Q: torch.Tensor | None = None,
        attn: torch.Tensor | None = None,
    ) -> "KVQuantizer":
        """Fit on calibration tokens.

        Keys are weighted by h_j = E[q_j²] of their head's queries, so that their error is that of
        the logits; rows of both by the mean attention that a token receives, at least a tenth of
        the mean.

        Args:
            K: (B, H, n, d) keys.
            V: (B, H, n, d) values.
            Q: (B, Hq, n_q, d) queries, Hq a multiple of H; None weighs channels alike.
            attn: (B, Hq, n_q, n) attention weights; None weighs tokens alike.

        Raises:
            ValueError: shapes that do not fit.
        """
        for name, x in (("K", K), ("V", V)):
            if x.ndim != 4 or x.shape[3] != self.head_dim:
                raise ValueError(f"{name} must be (B, H, n, {self.head_dim}): got {tuple(x.shape)}")
        if K.shape != V.shape:
            raise ValueError(f"K and V must have one shape: got {tuple(K.shape)}, {tuple(V.shape)}")
        B, H, n, d = K.shape
        for name, x, last in (("Q", Q, d), ("attn", attn, n)):
            bad = x is not None and (x.ndim != 4 or x.shape[1] % H or x.shape[3] != last)
            if bad or (x is not None and len(x) != B):
                raise ValueError(
                    f"{name} must be ({B}, a multiple of {H}, n_q, {last}): got {tuple(x.shape)}"
                )
        self.n_kv_heads = H
        self.key_quantizers, self.value_quantizers = [], []
        for head in range(H):
            h = w = None
            if Q is not None:
                per = Q.shape[1] // H
                h = Q[:, head * per : (head + 1) * per].reshape(-1, d).square().mean(dim=0)
                h = h.clamp_min(1e-6 * float(h.mean()))
            if attn is not None:
                per = attn.shape[1] // H
                mass = attn[:, head * per : (head + 1) * per].mean(dim=(1, 2)).reshape(-1)
                w = mass.clamp_min(0.1 * float(mass.mean()))
            for x, metric, out in ((K, h, self.key_quantizers), (V, None, self.value_quantizers)):
                out.append(self._fit_head(x[:, head].reshape(-1, d), metric, w))
        self.key_codebooks, self.value_codebooks = (
            torch.stack([torch.stack([q.codebooks_ for q in head]) for head in made])
            for made in (self.key_quantizers, self.value_quantizers)
        )
        return self

    def _fit_head(self, x, h, w) -> list[ResidualQuantizer]:
        x = self._scaled(x)[0]
        made = []
        for g in range(self.n_groups):
            part = slice(g * self.group_dim, (g + 1) * self.group_dim)
            metric = None if h is None else h[part]
            made.append(self._made().fit(x[:, part], sample_weight=w, channel_weight=metric))
        return made

    def _scaled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens divided by their scales, and the scales."""
        if not self.token_scale:
            return x, torch.ones_like(x[..., 0])
        rho = _token_scale(x)
        return x / torch.where(rho > 0, rho, 1.0)[..., None], rho

    @property
    def codebook_bytes(self) -> int:
        """Bytes of all codebooks in float16: constants of the model, not of a cache."""
        return 2 * (self.key_codebooks.numel() + self.value_codebooks.numel())

    def cache(self) -> "QuantizedKV":
        """An empty cache that uses these codebooks."""
        if not hasattr(self, "key_codebooks"):
            raise NotFittedError("call fit before cache")
        return QuantizedKV(self)


class QuantizedKV(KVCache):
    """A cache of residual-quantised tokens between sinks and a sliding window.

    Args:
        quantizer: fitted codebooks.
    """

    def __init__(self, quantizer: KVQuantizer):
        self.quantizer = quantizer
        super().__init__(
            quantizer.n_kv_heads,
            quantizer.head_dim,
            residual_length=1,
            window=quantizer.window,
            sinks=quantizer.sinks,
        )

    def _clear(self) -> None:
        # for keys and values: codes (B, H, n, G, M) uint8 and scales (B, H, n) float16
        self._codes: list[torch.Tensor | None] = [None, None]
        self._scales: list[torch.Tensor | None] = [None, None]

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        q = self.quantizer
        for i, (x, made) in enumerate(((k, q.key_quantizers), (v, q.value_quantizers))):
            x = x.to(q.key_codebooks.dtype)
            scaled, rho = q._scaled(x)
            B, H, n, _ = x.shape
            codes = torch.empty(B, H, n, q.n_groups, q.n_stages, dtype=torch.uint8, device=x.device)
            for head in range(H):
                for g, quantizer in enumerate(made[head]):
                    part = slice(g * q.group_dim, (g + 1) * q.group_dim)
                    rows = scaled[:, head, :, part].reshape(B * n, q.group_dim)
                    codes[:, head, :, g] = quantizer.encode(rows).reshape(B, n, q.n_stages)
            codes[rho == 0] = 0
            for held, new in ((self._codes, codes), (self._scales, rho.half())):
                held[i] = new if held[i] is None else torch.cat([held[i], new], dim=2)

    def _decoded(self, i: int) -> torch.Tensor:
        q, codes = self.quantizer, self._codes[i].long()
        books = (q.key_codebooks, q.value_codebooks)[i]
        B, H, n, G, M = codes.shape
        out = books.new_zeros(B, H, n, q.head_dim)
        for head in range(H):
            for g in range(G):
                part = slice(g * q.group_dim, (g + 1) * q.group_dim)
                for m in range(M):
                    out[:, head, :, part] += books[head, g, m][codes[:, head, :, g, m]]
        return out * self._scales[i].to(out.dtype)[..., None]

    def _stored_keys(self) -> torch.Tensor:
        return self._decoded(0)

    def _stored_values(self) -> torch.Tensor:
        return self._decoded(1)

    def keys(self) -> torch.Tensor:
        """(B, H, n_tokens, d), decoded; rotated where the keys came without rotation."""
        k = super().keys()
        if self.quantizer.rope_keys == "before":
            return rope(k, torch.arange(k.shape[2], device=k.device))
        return k

    def attend(self, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """As :meth:`KVCache.attend`; keys without rotation are decoded and rotated first."""
        if self.quantizer.rope_keys == "after" or not self.n_tokens:
            return super().attend(q, scale)
        return attend_partial(q, self.keys(), self.values(), scale=scale).output().to(q.dtype)

    def _attend_stored(self, q: torch.Tensor, scale: float | None) -> PartialAttention:
        books, held = self.quantizer, (self._codes, self._scales)
        B, Hq, n_q, d = q.shape
        per = Hq // self.n_kv_heads
        dtype = books.key_codebooks.dtype
        scale = 1 / math.sqrt(d) if scale is None else scale
        shape = (B, self.n_kv_heads, per * n_q)
        m, l = q.new_zeros(shape, dtype=dtype), q.new_zeros(shape, dtype=dtype)
        o = q.new_zeros(*shape, d, dtype=dtype)
        rows = q.reshape(B, self.n_kv_heads, per * n_q, d).to(dtype)
        for b in range(B):
            for head in range(self.n_kv_heads):
                codes, scales = ([part[i][b, head] for i in (0, 1)] for part in held)
                scales = [s.to(dtype) for s in scales]
                logits = lut_scores(
                    rows[b, head], codes[0], books.key_codebooks[head], scales[0]
                ).mul_(scale)
                m[b, head] = logits.amax(dim=1)
                p = (logits - m[b, head][:, None]).exp_()
                l[b, head] = p.sum(dim=1)
                o[b, head] = histogram_values(p, codes[1], books.value_codebooks[head], scales[1])
        back = (B, Hq, n_q)
        return PartialAttention(m.reshape(back), l.reshape(back), o.reshape(*back, d))

    def _stored_bits(self) -> KVBits:
        q = self.quantizer
        B, H, n = self._scales[0].shape
        token = q.n_stages * q.n_groups * math.log2(q.n_clusters) + 16 * q.token_scale
        return KVBits(B * H * n * token, B * H * n * token)

    def _stored_nbytes(self) -> int:
        codes = sum(c.numel() for c in self._codes)
        return codes + self.quantizer.token_scale * sum(2 * s.numel() for s in self._scales)


def attention(q: torch.Tensor, qkv: QuantizedKV, scale: float | None = None) -> torch.Tensor:
    """Attention of queries (B, Hq, n_q, d) to a quantised cache: (B, Hq, n_q, d)."""
    return qkv.attend(q, scale)


# --------------------------------------------------------------------------------------------
# Measures


def attention_output_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_hat: torch.Tensor,
    v_hat: torch.Tensor,
    *,
    scale: float | None = None,
) -> AttentionError:
    """:func:`icmllab.toolbox.kv_cache.attention_error` of one head: all arguments are (n, d)."""
    four = [x[None, None] for x in (q, k, v, k_hat, v_hat)]
    return attention_error(*four, scale=scale)


def topk_retrieval(q: torch.Tensor, k: torch.Tensor, k_hat: torch.Tensor, top: int = 1) -> float:
    """Share of queries whose best exact key is among the ``top`` best decoded ones.

    Args:
        q: (n_q, d).
        k: (n, d) exact.
        k_hat: (n, d) decoded.
        top: in 1..n.

    Raises:
        ValueError: ``top`` out of range, or keys that do not fit.
    """
    if k_hat.shape != k.shape or q.shape[1:] != k.shape[1:]:
        got = ", ".join(str(tuple(x.shape)) for x in (q, k, k_hat))
        raise ValueError(f"q, k and k_hat must be (n_q, d), (n, d) and (n, d): got {got}")
    if not 1 <= top <= len(k):
        raise ValueError(f"top must be in 1..{len(k)}: got {top}")
    wanted = (q @ k.T).argmax(dim=1, keepdim=True)
    return float((wanted == (q @ k_hat.T).topk(top, dim=1).indices).any(dim=1).double().mean())


def centroid_shrinkage(X: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """‖mean of a cell‖ over the mean length of its members: (K,), nan for empty cells.

    It is the mean resultant length of the members' directions when their lengths are equal.
    """
    K = int(labels.max()) + 1
    sums, counts = cluster_sums(X, labels, K)
    lengths = X.new_zeros(K).index_add_(0, labels, X.norm(dim=1))
    return torch.where(counts > 0, sums.norm(dim=1) / lengths, torch.nan)


# --------------------------------------------------------------------------------------------
# Data

DIM = 64
N_TRAIN, N_TEST = 6000, 2000


def isotropic(n: int, seed: int = 0, *, d: int = DIM) -> torch.Tensor:
    """N(0, I): (n, d) float32. Data set C: directions differ, lengths hardly do."""
    return torch.randn(n, d, generator=_generator(seed))


def heavy_tailed(n: int, seed: int = 0, *, d: int = DIM) -> torch.Tensor:
    """e^{z/2} N(0, I), z ~ N(0, 1): (n, d) float32. Data set A, lengths over two decades."""
    g = _generator(seed)
    x = torch.randn(n, d, generator=g)
    return torch.exp(0.5 * torch.randn(n, 1, generator=g)) * x


def kv_like(n: int, seed: int = 0, *, d: int = DIM) -> torch.Tensor:
    """64 directions, channels of different scale, lognormal lengths: (n, d) float32. Data set B.

    x = (2.5 c_j + 1.5 N(0, I)/√d)∘e^{0.7 N} · e^{0.4 z}; directions and channel scales are those of
    one model, whatever the seed.
    """
    model = _generator(123)
    centres = torch.randn(64, d, generator=model)
    centres = centres / centres.norm(dim=1, keepdim=True)
    channels = torch.exp(0.7 * torch.randn(d, generator=model))
    g = _generator(seed)
    j = torch.randint(64, (n,), generator=g)
    x = 2.5 * centres[j] + 1.5 * torch.randn(n, d, generator=g) / math.sqrt(d)
    return x * channels * torch.exp(0.4 * torch.randn(n, 1, generator=g))


DATA: dict[str, Callable] = {"A": heavy_tailed, "B": kv_like, "C": isotropic}


def split(data: str, seed: int, *, token_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(6000, 64) rows to train on and (2000, 64) to test on.

    Args:
        data: "A", "B" or "C".
        seed: of all rows.
        token_scale: divide each row by ‖x‖/√d.

    Raises:
        ValueError: an unknown data set.
    """
    if data not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}: got {data!r}")
    X = DATA[data](N_TRAIN + N_TEST, seed)
    if token_scale:
        X = X / (X.norm(dim=1, keepdim=True) / math.sqrt(X.shape[1]))
    return X[:N_TRAIN], X[N_TRAIN:]


# --------------------------------------------------------------------------------------------
# Experiments

METHODS = ("gskm", "random", "kmeans++")


def quantizer(method: str, n_stages: int, seed: int, *, max_iter: int = 12) -> ResidualQuantizer:
    """Residual quantisers of equal codebooks, iterations and rows.

    Args:
        method: "gskm"; "random" and "kmeans++" for scikit-learn's KMeans from either start, "fresh"
            for random rows that are other ones in each stage; "ema" for :class:`EMAQuantizer`;
            "mean_norm" for the negative control.
        n_stages: M.
        seed: of all starts.
        max_iter: rounds of a stage.

    Raises:
        ValueError: an unknown method.
    """
    from sklearn.cluster import KMeans

    made = {
        "gskm": lambda: GainShapeKMeans(max_iter=max_iter),
        "random": lambda: KMeans(init="random", n_init=1, max_iter=max_iter),
        "fresh": lambda: KMeans(init="random", n_init=1, max_iter=max_iter),
        "kmeans++": lambda: KMeans(init="k-means++", n_init=1, max_iter=max_iter),
        "ema": lambda: EMAQuantizer(epochs=max_iter),
        "mean_norm": lambda: GainShapeKMeans(max_iter=max_iter, gain="mean_norm"),
    }
    if method not in made:
        raise ValueError(f"method must be one of {', '.join(made)}: got {method!r}")
    starts = "new" if method == "fresh" else "same"
    return ResidualQuantizer(
        n_stages, kmeans=made[method](), random_state=100 * seed, starts=starts
    )


STAGES = (1, 2, 4, 8)


def quantizer_run(
    data: str, method: str, seed: int, *, token_scale: bool = False, n_stages: int = 8
) -> dict[str, float]:
    """One quantiser on one data set: what is left after each number of stages.

    Returns:
        ``mse_m`` and ``cos_m`` on test rows and ``train_mse_m`` after m of 1, 2, 4, 8 stages;
        ``usage_m``, perplexity of the codes of stage m on training rows; ``largest`` cell and
        ``singles`` of stage 1; ``zeros``, training rows with nothing left over; ``shrinkage``, the
        mean of the first stage, weighted by members.
    """
    train, test = split(data, seed, token_scale=token_scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        q = quantizer(method, n_stages, seed).fit(train)
    codes = {"train": q.encode(train), "test": q.encode(test)}
    out: dict[str, float] = {}
    for m in (m for m in STAGES if m <= n_stages):
        for name, x in (("train", train), ("test", test)):
            x_hat = sum(q.codebooks_[i][codes[name][:, i].long()] for i in range(m))
            prefix = "" if name == "test" else "train_"
            out[f"{prefix}mse_{m}"] = float(relative_mse(x, x_hat))
            if name == "test":
                out[f"cos_{m}"] = float(mean_cosine(x, x_hat))
        counts = torch.bincount(codes["train"][:, m - 1].long(), minlength=q.n_clusters)
        out[f"usage_{m}"] = float(usage_perplexity(counts.double()))
    first = codes["train"][:, 0].long()
    counts = torch.bincount(first, minlength=q.n_clusters)
    out |= {"largest": int(counts.max()), "singles": int((counts == 1).sum())}
    out["zeros"] = int((q.residual_.norm(dim=1) <= 1e-5 * train.norm(dim=1)).sum())
    shrink = centroid_shrinkage(train, first)
    seen = counts[: len(shrink)] > 0
    weight = counts[: len(shrink)][seen].double()
    out["shrinkage"] = float((shrink[seen].double() * weight).sum() / weight.sum())
    return out


class Probe(NamedTuple):
    """Keys to decode, and what attends to them.

    Attributes:
        train: (6000, 64) rows like the keys.
        keys: (1024, 64), test rows.
        values: (1024, 64), N(0, I).
        queries: (512, 64), each a key's direction with noise.
        scale: gives the logits of exact keys a standard deviation of 3.
    """

    train: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    scale: float

    def errors(self, decoded: torch.Tensor) -> dict[str, float]:
        """What decoded keys (1024, 64) do: relative squared output error, KL divergence, top-1."""
        found = attention_output_error(
            self.queries, self.keys, self.values, decoded, self.values, scale=self.scale
        )
        top1 = topk_retrieval(self.queries, self.keys, decoded)
        return {"output": float(found.output), "kl": float(found.kl), "top1": top1}


def retrieval_probe(data: str, seed: int) -> Probe:
    """Does a noisy copy of a key still find it among 1024 decoded ones?

    Args:
        data: as for :func:`split`, and so is ``seed``.
    """
    train, test = split(data, seed)
    keys = test[:1024]
    g = _generator(1000 + seed)
    values = torch.randn(1024, DIM, generator=g)
    j = torch.randint(1024, (512,), generator=g)
    noise = 0.5 * torch.randn(512, DIM, generator=g) / math.sqrt(DIM)
    queries = keys[j] / keys[j].norm(dim=1, keepdim=True) + noise
    return Probe(train, keys, values, queries, 3 / float((queries @ keys.T).std()))


def retrieval_run(method: str, seed: int, *, data: str = "A", n_stages: int = 4) -> dict:
    """:func:`retrieval_probe` with keys of a residual quantiser without token scales."""
    probe = retrieval_probe(data, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        q = quantizer(method, n_stages, seed).fit(probe.train)
    return probe.errors(q.decode(q.encode(probe.keys)))


def scalar_run(bits: int, seed: int, *, data: str = "A") -> dict[str, float]:
    """The same probe with scalar codes, per channel in groups of 128 tokens, as KIVI codes keys."""
    probe = retrieval_probe(data, seed)
    made = quantize_groupwise(probe.keys, bits, 0, 128)
    return {"bits": made.n_bits / probe.keys.numel(), **probe.errors(made.dequantize())}


def weighting_run(seed: int, *, n_stages: int = 4, method: str = "gskm") -> dict[str, float]:
    """Data B with token scale: what weights from calibration queries do to held-out logits.

    Args:
        seed: of rows and queries.
        n_stages: M.
        method: as for :func:`quantizer`.

    Returns:
        For "plain", "channels" (h_j = E[q_j²]), "tokens" (attention mass) and "both": ``_logit``,
        the mean squared error of the logits, ``_mse`` of the keys, ``_output`` of attention.
    """
    X = kv_like(N_TRAIN + N_TEST, seed)
    rho = _token_scale(X)[:, None]
    train, keys = X[:N_TRAIN], X[N_TRAIN:]
    g = _generator(2000 + seed)
    channel = torch.exp(torch.randn(DIM, generator=g))
    calibration, queries = (torch.randn(n, DIM, generator=g) * channel for n in (1024, 512))
    values = torch.randn(N_TEST, DIM, generator=g)
    h = calibration.square().mean(dim=0)
    logits = calibration @ train.T
    mass = (3 * logits / logits.std()).softmax(dim=1).mean(dim=0)
    mass = mass.clamp_min(0.1 * float(mass.mean()))
    exact = queries @ keys.T
    scale = 3 / float(exact.std())
    out = {}
    for name, rows, channels in (
        ("plain", None, None),
        ("channels", None, h),
        ("tokens", mass, None),
        ("both", mass, h),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            q = quantizer(method, n_stages, seed)
            q.fit(train / rho[:N_TRAIN], sample_weight=rows, channel_weight=channels)
        decoded = q.decode(q.encode(keys / rho[N_TRAIN:])) * rho[N_TRAIN:]
        error = attention_output_error(queries, keys, values, decoded, values, scale=scale)
        out[f"{name}_logit"] = float((queries @ decoded.T - exact).square().mean())
        out[f"{name}_mse"] = float(relative_mse(keys, decoded))
        out[f"{name}_output"] = float(error.output)
    return out


RUNS = (
    *(f"A {m} {s}" for m in METHODS for s in range(5)),
    *(f"A {m} {s}" for m in ("gskm", "random") for s in range(5, 11)),
    *(f"A {m} 0" for m in ("ema", "mean_norm")),
    *(f"{d} fresh {s}" for d in ("A", "C+") for s in range(3)),
    *(f"{d}{t} {m} {s}" for d, t in (("B", "+"), ("B", ""), ("C", "+"), ("C", ""))
      for m in METHODS for s in range(3)),
    *(f"retrieval {m} {s} {b}" for m in ("gskm", "random", "kmeans++") for s in range(3)
      for b in (1, 2, 4, 8)),
    *(f"retrieval {m} {s} 4" for m in ("gskm", "random") for s in range(3, 11)),
    *(f"retrievalB {m} {s} 8" for m in ("gskm", "random") for s in range(3)),
    *(f"scalar {b} {s}" for b in (1, 2) for s in range(3)),
    *(f"weighting {m} {s} 4" for m in ("gskm", "random") for s in range(10)),
    *(f"weighting {m} {s} 8" for m in ("gskm", "random") for s in range(3)),
)  # fmt: skip
"""The shipped runs: data set ("+" with token scale), method, seed; and the probes."""


def study_run(run: str) -> dict[str, float]:
    """One of :data:`RUNS`.

    Raises:
        ValueError: an unknown run.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS, such as {RUNS[0]!r}: got {run!r}")
    kind, method, seed, *rest = run.split()
    if kind.startswith("retrieval"):
        data = kind.removeprefix("retrieval") or "A"
        return retrieval_run(method, int(seed), data=data, n_stages=int(rest[0]))
    if kind == "scalar":
        return scalar_run(int(method), int(seed))
    if kind == "weighting":
        return weighting_run(int(seed), n_stages=int(rest[0]), method=method)
    return quantizer_run(kind[0], method, int(seed), token_scale=kind.endswith("+"))


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=efficiency/gsrq`` computes."""


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def check_gain(fn: Callable) -> None:
    """Exercise 1: ``fn(X, s, w)`` is the gain g that minimises Σ w‖x − g s‖² for a unit shape s.

    Raises:
        AssertionError: with the derivative at the answer.
    """
    rng = np.random.default_rng(0)
    for case in range(20):
        n, d = int(rng.integers(2, 30)), int(rng.integers(1, 9))
        X, w = rng.normal(size=(n, d)) + 1, rng.uniform(0.1, 3, n)
        s = X.sum(axis=0) / np.linalg.norm(X.sum(axis=0))
        g = float(fn(X.copy(), s.copy(), w.copy()))
        slope = float((w * (g - X @ s)).sum()) / float(w.sum())
        assert abs(slope) <= 1e-10, (
            f"problem {case}: the derivative of Σ w‖x − g s‖² by g, over 2 Σ w, must be 0 at your "
            f"g = {g:.6f}: it is {slope:.2g}"
        )


def check_gskm_step(fn: Callable) -> None:
    """Exercise 2: ``fn(X, shapes, w)`` does one step and returns (labels, shapes, gains).

    On 20 random problems the alignment Σ w⟨x, s⟩ must not decrease over five steps, and each
    codeword must be the weighted mean of its cell. Cells without members keep their shape.

    Raises:
        AssertionError: with the step that fails.
    """
    rng = np.random.default_rng(1)
    for case in range(20):
        n, d, K = int(rng.integers(20, 60)), int(rng.integers(2, 6)), int(rng.integers(2, 6))
        X = rng.normal(size=(n, d)) * np.exp(rng.normal(size=(n, 1)))
        w = rng.uniform(0.5, 2, n)
        shapes = X[:K] / np.linalg.norm(X[:K], axis=1, keepdims=True)
        before = -math.inf
        for step in range(5):
            where = f"problem {case}, step {step + 1}"
            wanted = (X @ shapes.T).argmax(axis=1)
            labels, new, gains = (np.asarray(v) for v in fn(X.copy(), shapes.copy(), w.copy()))
            assert np.array_equal(labels, wanted), (
                f"{where}: a row goes to the shape with the largest inner product, not to the "
                f"nearest codeword: {int((labels != wanted).sum())} of {n} rows differ"
            )
            for k in range(K):
                cell = labels == k
                if not cell.any():
                    assert np.allclose(new[k], shapes[k]), (
                        f"{where}: empty cell {k} keeps its shape"
                    )
                    continue
                mean = (w[cell, None] * X[cell]).sum(axis=0) / w[cell].sum()
                gap = np.abs(gains[k] * new[k] - mean).max()
                assert gap <= 1e-10, (
                    f"{where}: gain times shape of cell {k} must be its weighted mean, it is off "
                    f"by {gap:.2g}"
                )
            after = float((w * (X * new[labels]).sum(axis=1)).sum())
            assert after >= before - 1e-9, (
                f"{where}: the alignment fell from {before:.6f} to {after:.6f}"
            )
            shapes, before = new, after


def check_lut(fn: Callable) -> None:
    """Exercise 3: ``fn(q, codes, codebooks, scale)`` gives logits (h, n) without decoding.

    NumPy arrays: q (h, d), codes (n, M) integers, codebooks (M, K, d), scale (n,).

    Raises:
        AssertionError: with the largest difference to the logits of decoded keys.
    """
    rng = np.random.default_rng(2)
    for case in range(10):
        h, n, M, K, d = (int(v) for v in rng.integers((1, 5, 1, 2, 2), (4, 40, 6, 17, 12)))
        q, books = rng.normal(size=(h, d)), rng.normal(size=(M, K, d))
        codes, scale = rng.integers(K, size=(n, M)), rng.uniform(0.5, 2, n)
        decoded = sum(books[m][codes[:, m]] for m in range(M)) * scale[:, None]
        wanted = q @ decoded.T
        got = np.asarray(fn(q.copy(), codes.copy(), books.copy(), scale.copy()))
        assert got.shape == (h, n), f"case {case}: the shape must be {(h, n)}: got {got.shape}"
        gap = np.abs(got - wanted).max()
        assert gap <= 1e-5, (
            f"case {case}: logits must equal those of decoded keys to 1e-5, the largest difference "
            f"is {gap:.2g}; did the token scale come in?"
        )


def check_gain_code(fn: Callable) -> None:
    """Exercise 4: ``fn(X, quantizer)`` adds a 2-bit gain to each row's code.

    X are rows of data B without token scale and the quantiser is fitted to others of them; the
    result is (decoded rows, bits an element). The error must fall, and 2/64 bit must be counted.

    Raises:
        AssertionError: with both errors, or the bits.
    """
    train, test = split("B", 0)
    q = quantizer("gskm", 4, 0).fit(train)
    plain = float(relative_mse(test, q.decode(q.encode(test))))
    decoded, bits = fn(test.clone(), q)
    wanted = q.bits_per_element + 2 / DIM
    assert abs(float(bits) - wanted) <= 1e-9, (
        f"two bits a row of {DIM} are 2/{DIM} bit an element: {wanted:.5f} in all, got {bits:.5f}"
    )
    decoded = torch.as_tensor(decoded)
    codes = q.decode(q.encode(test))
    ratio = (decoded * codes).sum(dim=1) / codes.square().sum(dim=1).clamp_min(1e-30)
    kinds = len(torch.unique((ratio * 1e4).round()))
    assert kinds <= 4, f"two bits tell four gains apart: {kinds} different ones were used"
    error = float(relative_mse(test, decoded))
    assert error < plain, f"the error must fall below {plain:.4f}: got {error:.4f}"


def check_beam(fn: Callable) -> None:
    """Exercise 5: ``fn(X, codebooks, beam)`` gives codes (n, M) with a smaller error than greedy.

    X (n, d), codebooks (M, K, d) tensors; beam search by squared distance with 4 partial codes.

    Raises:
        AssertionError: with both distortions.
    """
    for seed in (0, 1):
        train, test = split("A", seed)
        q = ResidualQuantizer(4, kmeans="lloyd", random_state=seed, n_clusters=64).fit(train)
        greedy = (test - q.decode(q.encode(test))).square().sum()
        codes = torch.as_tensor(fn(test.clone(), q.codebooks_.clone(), 4))
        assert tuple(codes.shape) == (len(test), 4), (
            f"codes must be {(len(test), 4)}: got {tuple(codes.shape)}"
        )
        found = (test - q.decode(codes.to(torch.uint8))).square().sum()
        assert float(found) <= float(greedy), (
            f"the distortion must not exceed that of greedy codes, {float(greedy):.1f}: got "
            f"{float(found):.1f}"
        )
