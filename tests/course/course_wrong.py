"""Plausible wrong answers to the labs' exercises, and partly right ones.

``WRONG[lab][exercise]`` lists answers that must lose all of the exercise's points;
``PARTLY[lab]`` pairs an exercise with an answer and the points that it must still earn.
"""

EXERCISES = {
    "orientation": {
        "mean-square": ("mean-square-visible", "mean-square-hidden"),
        "share": ("share-visible", "share-hidden", "trusted-hidden"),
        "settings": ("settings-visible", "settings-hidden"),
    },
    "representations": {
        "pvalue": ("pvalue-visible", "pvalue-checker", "pvalue-hidden"),
        "mknn": ("mknn-visible", "mknn-checker", "mknn-hidden"),
        "null-cka": ("null-cka-visible", "null-cka-checker", "null-cka-hidden"),
        "best-layer": ("best-layer-visible", "best-layer-checker", "best-layer-hidden"),
        "blocks": ("blocks-visible", "blocks-checker", "blocks-hidden"),
        "correction": ("correction-visible", "correction-checker", "correction-hidden"),
        "defects": ("defects-visible", "defects-checker", "defects-hidden"),
        "scale": ("scale-visible", "scale-checker", "scale-hidden"),
        "cells": ("cells-visible", "cells-checker", "cells-hidden"),
    },
}

WRONG = {
    "orientation": {
        "mean-square": {
            "square of the mean": """
def mean_square(values):
    return (sum(values) / len(values)) ** 2
""",
            "printed": """
def mean_square(values):
    print(sum(v * v for v in values) / max(1, len(values)))
""",
            "root": """
def mean_square(values):
    return (sum(v * v for v in values) / len(values)) ** 0.5
""",
        },
        "share": {
            "count": """
def share_that_holds(measured, above):
    return sum(v > above for v in measured)

def is_trusted(measured, above):
    return share_that_holds(measured, above) >= 0.95
""",
            "not smaller": """
def share_that_holds(measured, above):
    return 1 - sum(v < above for v in measured) / len(measured)

def is_trusted(measured, above):
    return share_that_holds(measured, above) > 0.95
""",
            "below": """
def share_that_holds(measured, above):
    return sum(v <= above for v in measured) / len(measured)

def is_trusted(measured, above):
    return share_that_holds(measured, above) >= 19 / 20
""",
        },
        "settings": {
            "swapped": """
def settings(name):
    if name == "quick":
        return {"n_seeds": 200, "n_samples": 3}
    return {"n_seeds": 5000, "n_samples": 20}
""",
            "tuple": """
def settings(name):
    return {"quick": (3, 200), "full": (20, 5000)}[name]
""",
            "full only": """
def settings(name):
    return {"n_seeds": 20, "n_samples": 5000}
""",
        },
    },
    "representations": {
        "pvalue": {
            "observed score not counted": """
def pvalue_and_tau(s0, null, alpha):
    return float((null >= s0).mean()), float(np.quantile(null, 1 - alpha))
""",
            "strictly greater": """
def pvalue_and_tau(s0, null, alpha):
    n = len(null) + 1
    p = (1 + (null > s0).sum()) / n
    return float(p), float(np.sort(null)[int((1 - alpha) * n) - 1])
""",
            "other tail": """
def pvalue_and_tau(s0, null, alpha):
    n = len(null) + 1
    p = (1 + (null <= s0).sum()) / n
    return float(p), float(np.sort(np.append(null, s0))[int(alpha * n)])
""",
        },
        "mknn": {
            "rows moved, names kept": """
def permuted_mknn(idx_x, idx_y, perm):
    shared = (idx_x[:, :, None] == idx_y[perm][:, None, :]).sum()
    return float(shared) / idx_x.numel()
""",
            "renamed by perm instead of its inverse": """
def permuted_mknn(idx_x, idx_y, perm):
    shared = (idx_x[:, :, None] == perm[idx_y[perm]][:, None, :]).sum()
    return float(shared) / idx_x.numel()
""",
            "names changed, rows kept": """
def permuted_mknn(idx_x, idx_y, perm):
    shared = (idx_x[:, :, None] == torch.argsort(perm)[idx_y][:, None, :]).sum()
    return float(shared) / idx_x.numel()
""",
        },
        "null-cka": {
            "not centred": """
def expected_null_cka(X, Y):
    K, L = X @ X.T, Y @ Y.T
    return float(K.trace() * L.trace() / ((len(X) - 1) * K.norm() * L.norm()))
""",
            "n instead of n - 1": """
def expected_null_cka(X, Y):
    K, L = (Z @ Z.T for Z in (X - X.mean(0), Y - Y.mean(0)))
    return float(K.trace() * L.trace() / (len(X) * K.norm() * L.norm()))
""",
            "zero": """
def expected_null_cka(X, Y):
    return 0.0
""",
        },
        "best-layer": {
            "smallest p-value of all pairs": """
def best_layer_pvalue(Xs, Ys, perms):
    m = ari.metric("cka_linear")
    every = torch.cat([torch.arange(perms.shape[1])[None], perms])
    scores = torch.stack([m.null(m.prepare(X, Y), every) for X in Xs for Y in Ys])
    return float((scores[:, 1:] >= scores[:, :1]).double().mean(dim=1).min())
""",
            "mean over pairs, observed order not counted": """
def best_layer_pvalue(Xs, Ys, perms):
    m = ari.metric("cka_linear")
    every = torch.cat([torch.arange(perms.shape[1])[None], perms])
    scores = torch.stack([m.null(m.prepare(X, Y), every) for X in Xs for Y in Ys]).mean(dim=0)
    return float((scores[1:] >= scores[0]).double().mean())
""",
            "other tail": """
def best_layer_pvalue(Xs, Ys, perms):
    m = ari.metric("cka_linear")
    every = torch.cat([torch.arange(perms.shape[1])[None], perms])
    best = torch.stack([m.null(m.prepare(X, Y), every) for X in Xs for Y in Ys]).amax(dim=0)
    return float((best <= best[0]).double().mean())
""",
        },
        "blocks": {
            "free permutations": """
def block_permutations(labels, n_perm, generator):
    return torch.stack([torch.randperm(len(labels), generator=generator) for _ in range(n_perm)])
""",
            "no permutation": """
def block_permutations(labels, n_perm, generator):
    return torch.arange(len(labels)).repeat(n_perm, 1)
""",
            "turned around within a label": """
def block_permutations(labels, n_perm, generator):
    perms = torch.arange(len(labels)).repeat(n_perm, 1)
    for label in labels.unique():
        members = torch.nonzero(labels == label)[:, 0]
        shifts = torch.randint(len(members), (n_perm,), generator=generator)
        for row, shift in enumerate(shifts.tolist()):
            perms[row, members] = members.roll(shift)
    return perms
""",
        },
        "correction": {
            "ridge towards zero": """
def shared_correction(As, U, lam):
    S = sum(A.T @ A for A in As)
    ridge = lam * np.trace(S) / len(S) * np.eye(len(S))
    return np.linalg.solve(S + ridge, sum(A.T @ U for A in As))
""",
            "λ without its scale": """
def shared_correction(As, U, lam):
    S, eye = sum(A.T @ A for A in As), np.eye(U.shape[1])
    return np.linalg.solve(S + lam * eye, sum(A.T @ U for A in As) + lam * eye)
""",
            "no ridge": """
def shared_correction(As, U, lam):
    return np.linalg.lstsq(np.vstack(As), np.vstack([U] * len(As)), rcond=None)[0]
""",
        },
        "defects": {
            "exchanged": """
def linear_defects(G_A, G_B):
    def unseen(seen, by):
        rest = seen - seen @ np.linalg.pinv(by) @ by
        return float((rest**2).sum() / (seen**2).sum())

    return unseen(G_A, G_B), unseen(G_B, G_A)
""",
            "what is seen": """
def linear_defects(G_A, G_B):
    def share(seen, by):
        return float(((seen @ np.linalg.pinv(by) @ by) ** 2).sum() / (seen**2).sum())

    return share(G_B, G_A), share(G_A, G_B)
""",
            "rank not looked at": """
def linear_defects(G_A, G_B):
    def unseen(seen, by):
        Q = np.linalg.qr(by.T)[0]
        return float(1 - ((seen @ Q) ** 2).sum() / (seen**2).sum())

    return unseen(G_B, G_A), unseen(G_A, G_B)
""",
        },
        "scale": {
            "mean of the logarithms": """
def anchor_scale(AX, AY, r):
    ranks = [A.argsort(axis=1, kind="stable").argsort(axis=1) for A in (AX, AY)]
    near = (ranks[0] <= r) | (ranks[1] <= r)
    a, b = np.nonzero(np.triu(near | near.T, 1))
    return float(np.exp(np.mean(np.log(AX[a, b] / AY[a, b]))))
""",
            "median of the ratios": """
def anchor_scale(AX, AY, r):
    ranks = [A.argsort(axis=1, kind="stable").argsort(axis=1) for A in (AX, AY)]
    near = (ranks[0] <= r) | (ranks[1] <= r)
    a, b = np.nonzero(np.triu(near | near.T, 1))
    return float(np.median(AX[a, b] / AY[a, b]))
""",
            "all pairs": """
def anchor_scale(AX, AY, r):
    a, b = np.triu_indices(len(AX), 1)
    return float(np.exp(np.median(np.log(AX[a, b] / AY[a, b]))))
""",
        },
        "cells": {
            "every sign vector": """
def cell_count(D, d):
    return 2**D
""",
            "one term": """
def cell_count(D, d):
    return math.comb(D, d)
""",
            "last term forgotten": """
def cell_count(D, d):
    return sum(math.comb(D, k) for k in range(d))
""",
        },
    },
}

PARTLY = {
    "orientation": [
        (
            "mean-square",
            """
def mean_square(values):
    return sum(v * v for v in values) / max(1, len(values))
""",
            1,
        ),
        (
            "share",
            """
def share_that_holds(measured, above):
    return sum(v > above for v in measured) / len(measured)

def is_trusted(measured, above):
    return share_that_holds(measured, above) > 0.95
""",
            2,
        ),
        (
            "settings",
            """
def settings(name):
    if name == "quick":
        return {"n_seeds": 3, "n_samples": 200}
    return {"n_seeds": 20, "n_samples": 5000}
""",
            1,
        ),
    ],
    "representations": [
        (
            "pvalue",
            """
def pvalue_and_tau(s0, null, alpha):
    n = len(null) + 1
    p = (1 + (null >= s0).sum()) / n
    return float(p), float(np.sort(np.append(null, s0))[math.ceil((1 - alpha) * n) - 1])
""",
            3,
        ),
        (
            "blocks",
            """
def block_permutations(labels, n_perm, generator):
    perms = torch.empty(n_perm, len(labels), dtype=torch.int64)
    for label in range(4):
        members = torch.nonzero(labels == label)[:, 0]
        noise = torch.rand(n_perm, len(members), generator=generator)
        perms[:, members] = members[noise.argsort(dim=1)]
    return perms
""",
            3,
        ),
        (
            "correction",
            """
def shared_correction(As, U, lam):
    S = sum(A.T @ A for A in As)
    ridge = lam * np.trace(S) * np.eye(len(S))
    return np.linalg.solve(S + ridge, sum(A.T @ U for A in As) + ridge)
""",
            1,
        ),
        (
            "scale",
            """
def anchor_scale(AX, AY, r):
    near = AX.argsort(axis=1, kind="stable").argsort(axis=1) <= r
    a, b = np.nonzero(np.triu(near | near.T, 1))
    return float(np.exp(np.median(np.log(AX[a, b] / AY[a, b]))))
""",
            1,
        ),
        (
            "cells",
            """
def cell_count(D, d):
    return round(sum(float(math.comb(D, k)) for k in range(d + 1)))
""",
            3,
        ),
    ],
}
