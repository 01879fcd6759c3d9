"""Token merging with mass: its parts against plain loops, identities, other libraries."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import average_precision_score
from torch.utils.flop_counter import FlopCounterMode

from icmllab.efficiency import sre_merge as sre
from icmllab.kernels import aot, runtime

F32, F64 = torch.float32, torch.float64


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(B=3, grid=(4, 5), d=6, *, heads=2, seed=0, dtype=F64):
    """x, attn, sizes, pos of random tokens."""
    n, r = math.prod(grid), g(seed)
    x = torch.randn(B, 1 + n, d, generator=r, dtype=F64)
    attn = torch.randn(B, heads, 1 + n, 1 + n, generator=r, dtype=F64).mul(2).softmax(dim=3)
    sizes = torch.randint(1, 5, (B, 1 + n), generator=r).double()
    pos = sre.grid_positions(grid).double() + 0.1 * torch.rand(B, n, 2, generator=r, dtype=F64)
    return tuple(t.to(dtype) for t in (x, attn, sizes, pos))


def tokens_of(x, sizes, pos):
    state = sre.start_tokens(x, pos)
    return state._replace(sizes=sizes)


# --------------------------------------------------------------------------------------------
# Mass


def loop_mass(x, attn, sizes, pos, sigma, beta):
    """The formula, one token at a time."""
    out = np.empty(pos.shape[:2])
    x, attn, sizes, pos = (t.double().numpy() for t in (x, attn, sizes, pos))
    for b in range(len(x)):
        for i in range(pos.shape[1]):
            N = np.exp(-((pos[b] - pos[b, i]) ** 2).sum(1) / (2 * sigma**2))
            P, Q = attn[b, :, 1 + i, 1:].mean(0) * N, N / N.sum()
            P = P / P.sum()
            h = -(P * np.log(P + 1e-9)).sum() / max(-(Q * np.log(Q + 1e-9)).sum(), 0.01)
            w = N * sizes[b, 1:]
            mu = (w[:, None] * x[b, 1:]).sum(0) / w.sum()
            c = 1 - x[b, 1 + i] @ mu / np.linalg.norm(x[b, 1 + i]) / np.linalg.norm(mu)
            out[b, i] = (c + 1e-3) * math.exp(beta * (1 - min(max(h, 0), 1)))
        out[b] /= out[b].mean()
    return torch.from_numpy(out)


@pytest.mark.parametrize(("dtype", "tol"), [(F32, 5e-5), (F64, 1e-11)])
@pytest.mark.parametrize(("sigma", "beta"), [(1.5, 2.0), (0.4, 0.5), (6.0, 0.0)])
def test_mass_is_the_formula_token_by_token(sigma, beta, dtype, tol):
    made = inputs(dtype=dtype)
    got = sre.spatial_entropic_mass(*made, sigma=sigma, beta=beta)
    assert got.dtype == dtype
    wanted = loop_mass(*made, sigma, beta)
    torch.testing.assert_close(got.double(), wanted, rtol=tol, atol=tol)


def test_mass_is_normalised_in_each_image_and_knows_nothing_of_the_others():
    x, attn, sizes, pos = inputs(B=4)
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)
    torch.testing.assert_close(mass.mean(dim=1), torch.ones(4, dtype=F64))
    alone = sre.spatial_entropic_mass(x[2:3], attn[2:3], sizes[2:3], pos[2:3])
    torch.testing.assert_close(mass[2:3], alone)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5, 4.0])
def test_uniform_attention_has_local_entropy_one_at_every_place(sigma):
    _, attn, _, pos = inputs(grid=(6, 3))
    flat = torch.full_like(attn, 1 / attn.shape[2])
    got = sre.local_entropy(flat, pos, sigma=sigma)
    if sigma > 0.5:
        torch.testing.assert_close(got, torch.ones_like(got))
    else:  # windows with next to no entropy are divided by the floor instead
        assert (got <= 1).all()


def test_local_entropy_of_an_endless_window_is_the_entropy_over_ln_n():
    _, attn, _, pos = inputs(heads=3)
    p = attn[:, :, 1:, 1:].mean(dim=1)
    p = p / p.sum(dim=2, keepdim=True)
    wanted = torch.distributions.Categorical(probs=p).entropy() / math.log(p.shape[2])
    for where, sigma in ((None, math.inf), (pos, math.inf), (pos, 1e6)):
        got = sre.local_entropy(attn, where, sigma=sigma)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_attention_to_one_neighbour_has_no_entropy_and_far_attention_is_not_seen():
    _, attn, _, pos = inputs(B=1, grid=(1, 20), heads=1)
    n = 20
    one = torch.zeros_like(attn)
    one[:, :, :, 2] = 1.0  # all look at the second patch
    assert float(sre.local_entropy(one, pos, sigma=2.0)[0, :5].abs().max()) < 1e-6
    # what a row gives to patches far outside of its window changes nothing
    far = attn.clone()
    far[0, 0, 1, n - 3 :] *= 5
    a, b = (sre.local_entropy(t, pos, sigma=1.0)[0, 0] for t in (attn, far))
    torch.testing.assert_close(a, b)
    wide = [sre.local_entropy(t, pos, sigma=math.inf)[0, 0] for t in (attn, far)]
    assert abs(float(wide[0] - wide[1])) > 1e-3


def test_class_attention_does_not_enter_the_local_entropy():
    _, attn, _, pos = inputs()
    other = attn.clone()
    other[:, :, 0] = 1.0
    other[:, :, :, 0] = 0.5
    a, b = (sre.local_entropy(t, pos) for t in (attn, other))
    torch.testing.assert_close(a, b)


def test_contrast_ignores_length_counts_sizes_and_vanishes_for_a_constant_image():
    x, _, sizes, pos = inputs()
    c = sre.local_contrast(x, sizes, pos)
    scaled = sre.local_contrast(7 * x, 3 * sizes, pos)
    torch.testing.assert_close(c, scaled)
    big = sizes.clone()
    big[:, 3] *= 50  # everybody's neighbourhood now is that patch
    assert float((sre.local_contrast(x, big, pos) - c).abs().max()) > 0.05
    same = x[:, :1].expand_as(x)
    assert float(sre.local_contrast(same, sizes, pos).max()) < 1e-12
    assert (c >= 0).all()
    assert (c <= 2).all()


def test_a_constant_image_has_masses_by_attention_alone():
    x, attn, sizes, pos = inputs()
    same = x[:, :1].expand_as(x)
    flat = torch.full_like(attn, 1 / attn.shape[2])
    mass = sre.spatial_entropic_mass(same, flat, sizes, pos)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-9, atol=1e-9)
    assert float(sre.spatial_entropic_mass(same, attn, sizes, pos).std()) > 0.1


def test_half_precision_is_computed_in_float32():
    x, attn, sizes, pos = inputs(dtype=F32)
    half = sre.spatial_entropic_mass(x.half(), attn.half(), sizes, pos)
    assert half.dtype == F32
    full = sre.spatial_entropic_mass(x.half().float(), attn.half().float(), sizes, pos)
    assert torch.equal(half, full)


def test_a_constant_image_merges_neighbours():
    pos = sre.grid_positions((8, 8)).double()
    state = sre.start_tokens(torch.ones(1, 65, 6, dtype=F64), pos)
    flat = torch.full((1, 2, 65, 65), 1 / 65, dtype=F64)
    plan = sre.SREMerge(8).step(state, state.x, flat, 8, 0).plan
    gap = sre._rows(state.pos, plan.src - 1) - sre._rows(state.pos, plan.dst - 1)
    assert float(gap.norm(dim=2).max()) == 1.0  # across the line between the two halves


def test_a_zero_token_has_contrast_one_and_no_nan():
    x, attn, sizes, pos = inputs()
    x[:, 4] = 0
    assert sre.local_contrast(x, sizes, pos)[:, 3].tolist() == [1.0] * 3
    assert torch.isfinite(sre.spatial_entropic_mass(x, attn, sizes, pos)).all()


BAD_MASS = {
    "attn of another size": ({"attn": torch.ones(3, 2, 20, 20)}, "attn must be"),
    "attn not square": ({"attn": torch.ones(3, 2, 21, 20)}, "attn must be"),
    "attn of another batch": ({"attn": torch.ones(2, 2, 21, 21)}, "attn must be"),
    "a size of zero": ({"sizes": torch.zeros(3, 21)}, "sizes must be positive: got 0"),
    "sizes of patches alone": ({"sizes": torch.ones(3, 20)}, "sizes must have shape"),
    "no positions": ({"pos": None}, "pos must be given"),
    "positions with the class": ({"pos": torch.ones(3, 21, 2)}, "pos must have shape"),
    "no image": ({"x": torch.ones(0, 21, 6)}, "x must be .* B, n, d >= 1"),
    "a class token alone": ({"x": torch.ones(3, 1, 6)}, "attn must be"),
    "sigma zero": ({"sigma": 0.0}, "sigma must be > 0"),
}


@pytest.mark.parametrize("case", BAD_MASS)
def test_bad_tokens_are_refused_by_name(case):
    x, attn, sizes, pos = inputs(dtype=F32)
    change, message = BAD_MASS[case]
    with pytest.raises(ValueError, match=message):
        sre.spatial_entropic_mass(**{"x": x, "attn": attn, "sizes": sizes, "pos": pos, **change})


# --------------------------------------------------------------------------------------------
# Matching


def loop_match(keys, mass, pos, r, lam, gamma, sigma, partition):
    """Pairs of patches, the formula written out, for one image."""
    n = len(mass)
    if partition == "mass":
        order = sorted(range(n), key=lambda i: (mass[i], i))
        a = sorted(order[: -(-n // 2)])
        b = sorted(order[-(-n // 2) :])
    else:
        a, b = list(range(0, n, 2)), list(range(1, n, 2))
    edges = []
    for i in a:
        scores = []
        for j in b:
            cos = keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j])
            near = math.exp(-((pos[i] - pos[j]) ** 2).sum() / (2 * sigma**2))
            heavy = math.sqrt(mass[i] * mass[j]) / mass.max()
            scores.append(cos + lam * near - gamma * heavy)
        best = int(np.argmax(scores))
        edges.append((-scores[best], i, b[best]))
    edges.sort()
    return a, b, edges[:r], edges[r:]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("partition", ["mass", "alternate"])
@pytest.mark.parametrize("r", [1, 6, 10])
def test_matching_is_the_formula_pair_by_pair(r, partition, dtype):
    x, attn, sizes, pos = inputs(B=4, grid=(3, 7), dtype=dtype)
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)
    plan = sre.hca_match(x, mass, pos, r, lam=0.3, gamma=0.8, sigma=1.2, partition=partition)
    for k in range(4):
        rows = [t[k].double().numpy() for t in (x[:, 1:], mass, pos)]
        a, b, merged, rest = loop_match(*rows, r, 0.3, 0.8, 1.2, partition)
        assert plan.a_index[k].tolist() == [i + 1 for i in a]
        assert plan.b_index[k].tolist() == [j + 1 for j in b]
        assert plan.src[k].tolist() == [i + 1 for _, i, _ in merged]
        assert plan.dst[k].tolist() == [j + 1 for _, _, j in merged]
        assert plan.unmerged[k].tolist() == [i + 1 for _, i, _ in rest]


def reference_tome(x, keys, sizes, r):
    """ToMe as its authors describe it, for one image without a class token."""
    n = len(x)
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    scores = unit[::2] @ unit[1::2].T
    best, to = scores.max(1), scores.argmax(1)
    order = np.argsort(-best, kind="stable")
    targets, total = x[1::2] * sizes[1::2, None], sizes[1::2].copy()
    for e in order[:r]:
        targets[to[e]] += x[2 * e] * sizes[2 * e]
        total[to[e]] += sizes[2 * e]
    stay = 2 * order[r:]
    assert len(stay) + len(total) == n - r
    pairs = [(2 * e, 2 * to[e] + 1) for e in order[:r]]
    merged = np.concatenate([x[stay], targets / total[:, None]])
    return merged, np.concatenate([sizes[stay], total]), pairs


@pytest.mark.parametrize("grid", [(4, 5), (3, 7), (1, 2)])
def test_with_equal_masses_and_no_terms_the_step_is_tome_index_by_index(grid):
    x, attn, sizes, pos = inputs(grid=grid, d=9)
    n = math.prod(grid)
    mass = torch.ones(3, n, dtype=F64)
    for r in range(1, n // 2 + 1):
        plan = sre.hca_match(x, mass, pos, r, lam=0.0, gamma=0.0, partition="alternate")
        tome = sre.bipartite_soft_matching(x, r)
        for mine, theirs in zip(plan, tome, strict=True):
            assert torch.equal(mine, theirs)
        got = sre.epw_fuse(x, sizes, pos, mass, plan, kappa=1.0)
        for k in range(3):
            y, s, pairs = reference_tome(
                x[k, 1:].numpy(), x[k, 1:].numpy(), sizes[k, 1:].numpy(), r
            )
            assert list(zip(plan.src[k].tolist(), plan.dst[k].tolist(), strict=True)) == [
                (i + 1, j + 1) for i, j in pairs
            ]
            np.testing.assert_allclose(got.x[k, 1:].numpy(), y, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(got.sizes[k, 1:].numpy(), s, rtol=1e-12)
            assert torch.equal(got.x[k, 0], x[k, 0])
    merger = sre.SREMerge(
        n // 2, lam=0, gamma=0, kappa=1, partition="alternate", mass=lambda x, *_: mass
    )
    state = tokens_of(x, sizes, pos)
    a, b = merger(state, x, attn), sre.ToMe(n // 2)(state, x, attn)
    assert torch.equal(a.source, b.source)
    torch.testing.assert_close(a.x, b.x, rtol=1e-12, atol=1e-12)


def test_a_heavy_token_is_never_a_source_of_the_split_by_mass():
    x, attn, sizes, pos = inputs(grid=(3, 7))
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)
    plan = sre.hca_match(x, mass, pos, 10)
    assert plan.a_index.shape[1] == 11  # the sources are the larger half
    light = mass.gather(1, plan.a_index - 1).amax(dim=1)
    heavy = mass.gather(1, plan.b_index - 1).amin(dim=1)
    assert (light <= heavy).all()


def test_equal_masses_split_by_index_and_equal_scores_merge_by_index():
    keys = torch.ones(1, 9, 4)
    mass, pos = torch.ones(1, 8), torch.zeros(1, 8, 2)
    plan = sre.hca_match(keys, mass, pos, 3)
    assert plan.a_index.tolist() == [[1, 2, 3, 4]]
    assert plan.b_index.tolist() == [[5, 6, 7, 8]]
    assert plan.src.tolist() == [[1, 2, 3]]
    assert plan.dst.tolist() == [[5, 5, 5]]
    assert plan.unmerged.tolist() == [[4]]
    tome = sre.bipartite_soft_matching(keys, 2)
    assert tome.src.tolist() == [[1, 3]]
    assert tome.dst.tolist() == [[2, 2]]


def test_each_term_does_what_it_is_for():
    x, attn, sizes, pos = inputs(grid=(8, 8), d=4)
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)

    def far(**options):
        plan = sre.hca_match(x, mass, pos, 20, partition="alternate", **options)
        gap = sre._rows(pos, plan.src - 1) - sre._rows(pos, plan.dst - 1)
        heavy = (mass.gather(1, plan.src - 1) * mass.gather(1, plan.dst - 1)).sqrt()
        return float(gap.norm(dim=2).mean()), float(heavy.mean())

    near, plain, light = far(lam=5.0, gamma=0.0), far(lam=0.0, gamma=0.0), far(lam=0.0, gamma=5.0)
    assert near[0] < 0.5 * plain[0]
    assert light[1] < 0.5 * plain[1]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_fused_and_eager_matching_agree(dtype):
    x, attn, sizes, pos = inputs(grid=(9, 9), dtype=dtype)
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)
    plans = [sre.hca_match(x, mass, pos, 30, backend=b) for b in ("fused", "eager", "auto")]
    for other in plans[1:]:
        assert all(torch.equal(a, b) for a, b in zip(plans[0], other, strict=True))


def test_permuting_the_patches_merges_the_same_groups():
    x, attn, sizes, pos = inputs(B=1, grid=(5, 6))
    state = tokens_of(x, sizes, pos)
    perm = torch.randperm(30, generator=g(5))
    full = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + perm])
    moved = tokens_of(x[:, full], sizes[:, full], pos[:, perm])
    merger = sre.SREMerge(12)
    a = merger(state, x, attn)
    b = merger(moved, x[:, full], attn[:, :, full][:, :, :, full])
    rows = [sorted(map(tuple, t.x[0, 1:].numpy().round(9).tolist())) for t in (a, b)]
    assert rows[0] == rows[1]


BAD_MATCH = {
    "r negative": ({"r": -1}, r"r must be a whole number in 0\.\.n//2 = 10: got -1"),
    "r more than half": ({"r": 11}, "r must be"),
    "r a fraction": ({"r": 1.5}, "r must be"),
    "mass of another shape": ({"mass": torch.ones(3, 21)}, "mass must have shape"),
    "mass zero": ({"mass": torch.zeros(3, 20)}, "mass must be positive"),
    "no positions": ({"pos": None}, "pos must be given"),
    "partition": ({"partition": "half"}, "partition must be"),
    "backend": ({"backend": "gpu"}, "backend must be"),
    "no image": ({"keys": torch.ones(0, 21, 6)}, "keys must be"),
}


@pytest.mark.parametrize("case", BAD_MATCH)
def test_bad_matchings_are_refused_by_name(case):
    keys, _, _, pos = inputs(dtype=F32)
    change, message = BAD_MATCH[case]
    good = {"keys": keys, "mass": torch.ones(3, 20), "pos": pos, "r": 2}
    with pytest.raises(ValueError, match=message):
        sre.hca_match(**{**good, **change})


def test_without_a_window_no_positions_are_needed():
    keys, _, _, pos = inputs()
    mass = 0.5 + torch.rand(3, 20, generator=g(3), dtype=F64)
    a = sre.hca_match(keys, mass, None, 5, lam=0.0)
    b = sre.hca_match(keys, mass, pos, 5, lam=0.0)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------------
# Fusion


def fused(r=9, seed=0, **options):
    x, attn, sizes, pos = inputs(grid=(4, 6), seed=seed)
    mass = sre.spatial_entropic_mass(x, attn, sizes, pos)
    plan = sre.hca_match(x, mass, pos, r)
    return x, sizes, pos, mass, plan, sre.epw_fuse(x, sizes, pos, mass, plan, **options)


@pytest.mark.parametrize("weight", ["mass", "size"])
@pytest.mark.parametrize("kappa", [1.0, 1.1, 1.5])
def test_fusion_is_the_formula_group_by_group_in_the_order_promised(weight, kappa):
    x, sizes, pos, mass, plan, out = fused(kappa=kappa, weight=weight)
    w = sizes[:, 1:] * (mass if weight == "mass" else 1)
    for k in range(len(x)):
        assert torch.equal(out.x[k, 0], x[k, 0])
        stay = plan.unmerged[k]
        assert torch.equal(out.x[k, 1 : 1 + len(stay)], x[k, stay])
        for place, j in enumerate(plan.b_index[k].tolist(), start=1 + len(stay)):
            group = [j, *plan.src[k][plan.dst[k] == j].tolist()]
            if len(group) == 1:
                assert torch.equal(out.x[k, place], x[k, j])
                assert torch.equal(out.pos[k, place - 1], pos[k, j - 1])
                continue
            at = torch.tensor(group)
            share = w[k, at - 1] / w[k, at - 1].sum()
            mean = share @ x[k, at]
            energy = share @ x[k, at].norm(dim=1)
            factor = min(float(energy / mean.norm()), kappa)
            torch.testing.assert_close(out.x[k, place], factor * mean)
            assert float(out.sizes[k, place]) == float(sizes[k, at].sum())
            by_size = sizes[k, at] / sizes[k, at].sum()
            torch.testing.assert_close(out.pos[k, place - 1], by_size @ pos[k, at - 1])


def test_energy_is_kept_unless_the_factor_is_clipped():
    x, sizes, _, mass, plan, long = fused(kappa=1e6)
    mean = fused(kappa=1.0)[-1]
    w = F_w = sizes * torch.cat([torch.ones(3, 1, dtype=F64), mass], dim=1)
    for k in range(3):
        for place, j in enumerate(plan.b_index[k].tolist(), start=1 + plan.unmerged.shape[1]):
            at = torch.tensor([j, *plan.src[k][plan.dst[k] == j].tolist()])
            energy = (w[k, at] * x[k, at].norm(dim=1)).sum() / F_w[k, at].sum()
            assert float(long.x[k, place].norm()) == pytest.approx(float(energy), rel=1e-12)
            assert float(mean.x[k, place].norm()) <= float(energy) * (1 + 1e-12)
            if len(at) > 1:  # random vectors are not parallel
                assert float(mean.x[k, place].norm()) < 0.999 * float(energy)


@settings(max_examples=40, deadline=None)
@given(k=st.integers(2, 8), d=st.integers(1, 6), seed=st.integers(0, 999), parallel=st.booleans())
def test_a_mean_is_as_long_as_its_members_only_if_they_are_parallel(k, d, seed, parallel):
    r = g(seed)
    X = torch.randn(k, d, generator=r, dtype=F64)
    if parallel:
        X = X[:1] * (0.1 + torch.rand(k, 1, generator=r, dtype=F64))
    w = 0.1 + torch.rand(k, generator=r, dtype=F64)
    mean, energy = (w @ X) / w.sum(), (w @ X.norm(dim=1)) / w.sum()
    lost = float(1 - mean.norm() / energy)
    cos = torch.nn.functional.cosine_similarity(X[:, None], X[None], dim=2)
    assert lost > -1e-12
    assert (lost < 1e-9) == bool((cos > 1 - 1e-9).all())
    # the variance that averaging removes is the weighted mean square less the mean's square
    inside = (w * (X - mean).square().sum(dim=1)).sum() / w.sum()
    square = (w * X.square().sum(dim=1)).sum() / w.sum()
    torch.testing.assert_close(inside, square - mean.square().sum())


def test_sizes_add_up_always_and_the_mean_token_is_kept_by_size_weights_alone():
    x, sizes, pos, *_, by_size = fused(kappa=1.0, weight="size")
    by_mass = fused(kappa=1.0)[-1]

    def centre(x, s):
        return (s[..., None] * x)[:, 1:].sum(dim=1) / s[:, 1:].sum(dim=1, keepdim=True)

    for out in (by_size, by_mass):
        torch.testing.assert_close(out.sizes.sum(dim=1), sizes.sum(dim=1))
        torch.testing.assert_close(
            centre(torch.nn.functional.pad(out.pos, (0, 0, 1, 0)), out.sizes),
            centre(torch.nn.functional.pad(pos, (0, 0, 1, 0)), sizes),
        )
    torch.testing.assert_close(centre(by_size.x, by_size.sizes), centre(x, sizes))
    gap = (centre(by_mass.x, by_mass.sizes) - centre(x, sizes)).abs().max()
    assert float(gap) > 1e-3


def test_nothing_to_merge_returns_the_very_tensors():
    x, attn, sizes, pos = inputs()
    mass = torch.ones(3, 20, dtype=F64)
    plan = sre.hca_match(x, mass, pos, 0)
    out = sre.epw_fuse(x, sizes, pos, mass, plan)
    assert out.x is x
    assert out.sizes is sizes
    assert out.pos is pos
    state = tokens_of(x, sizes, pos)
    for merger in (sre.SREMerge(0), sre.ToMe(0), sre.PiToMe(0), sre.ClsPruning(0)):
        assert merger(state, x, attn) is state
    single = tokens_of(x[:, :2], sizes[:, :2], pos[:, :1])
    assert sre.SREMerge(5)(single, x[:, :2], attn[:, :, :2, :2]) is single


def test_opposite_tokens_give_zero_and_not_nan():
    x = torch.tensor([[[9.0, 9], [1, 2], [-1, -2], [0, 0], [0, 0]]], dtype=F64)
    plan = sre.MergePlan(*(torch.tensor([t]) for t in ([1, 3], [2, 4], [1, 3], [2, 4], [])))
    plan = plan._replace(unmerged=plan.unmerged.long())
    out = sre.epw_fuse(x, torch.ones(1, 5, dtype=F64), None, torch.ones(1, 4, dtype=F64), plan)
    assert out.x.tolist() == [[[9, 9], [0, 0], [0, 0]]]
    assert out.pos is None


def test_fusion_gives_gradients():
    x, _, sizes, pos = inputs(grid=(2, 3))
    x.requires_grad_()
    mass = torch.ones(3, 6, dtype=F64)
    plan = sre.hca_match(x.detach(), mass, pos, 2)
    assert torch.autograd.gradcheck(lambda t: sre.epw_fuse(t, sizes, pos, mass, plan).x, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "area"}, "weight must be"),
        ({"mass": torch.ones(3, 21)}, "mass must have shape"),
        ({"mass": -torch.ones(3, 20)}, "mass must be positive"),
        ({"sizes": -torch.ones(3, 21)}, "sizes must be positive"),
        ({"kappa": 0.5}, "kappa must be"),
    ],
)
def test_bad_fusions_are_refused_by_name(change, message):
    x, _, sizes, pos = inputs(dtype=F32)
    mass = torch.ones(3, 20)
    plan = sre.hca_match(x, mass, pos, 3)
    good = {"x": x, "sizes": sizes, "pos": pos, "mass": mass, "plan": plan}
    with pytest.raises(ValueError, match=message):
        sre.epw_fuse(**{**good, **change})


# --------------------------------------------------------------------------------------------
# Mergers


@settings(max_examples=25, deadline=None)
@given(
    h=st.integers(1, 5), w=st.integers(1, 5), r=st.integers(0, 15), seed=st.integers(0, 99),
    name=st.sampled_from(["sre", "sre partition=alternate", "tome", "pitome", "random"]),
)  # fmt: skip
def test_mergers_conserve_patches_and_know_where_each_went(h, w, r, seed, name):
    x, attn, _, pos = inputs(grid=(h, w), seed=seed, heads=1)
    state = sre.start_tokens(x, pos)
    merger = sre.make_merger(name, r, seed=seed)
    for layer in range(3):
        n = state.x.shape[1] - 1
        attn = torch.ones(3, 1, n + 1, n + 1, dtype=F64) / (n + 1)
        new = merger(state, state.x, attn, layer)
        assert new.x.shape[1] - 1 == n - min(r, n // 2)
        state = new
    assert torch.equal(state.x[:, 0], x[:, 0])  # the class token is never merged
    for k in range(3):
        counts = torch.bincount(state.source[k], minlength=state.x.shape[1])
        assert counts.tolist() == [0, *state.sizes[k, 1:].tolist()]
        # every token stands where its patches stand
        place = torch.zeros(state.x.shape[1], 2, dtype=F64).index_add_(0, state.source[k], pos[k])
        torch.testing.assert_close(place[1:] / state.sizes[k, 1:, None], state.pos[k])
    grid = sre.unmerge(state.x, state.source)
    assert torch.equal(grid[0, 0], state.x[0, state.source[0, 0]])


def test_r_is_cut_to_half_of_the_tokens_and_a_ratio_rounds_up():
    data = sre.make_pedestrian_tokens(2, 0)
    for method in ("sre", "tome", "pitome", "random", "evit", "evit-drop"):
        trace = sre.compress(data.tokens, sre.make_merger(method, 34))
        assert [t.x.shape[1] - 1 for t in trace.layers] == [128, 94, 60, 30]
    assert sre.ToMe(keep_ratio=0.75).count(128) == 32
    assert sre.ToMe(keep_ratio=0.7).count(3) == 0
    assert sre.ToMe(keep_ratio=0.5).count(5) == 2
    for bad in ({}, {"r": 1, "keep_ratio": 0.9}, {"r": -1}, {"keep_ratio": 0.3}, {"r": True}):
        with pytest.raises(ValueError, match=r"r or keep_ratio|r must be|keep_ratio must be"):
            sre.ToMe(**bad)


@pytest.mark.parametrize("r", [1, 4, 10])
def test_pitome_protects_what_has_little_company(r):
    keys = inputs()[0]
    margin = 0.3
    plan = sre.energy_merge(keys, r, margin=margin)
    for k in range(3):
        unit = torch.nn.functional.normalize(keys[k, 1:], dim=1)
        cos = (unit @ unit.T).numpy()
        energy = np.where(cos >= margin, cos, np.exp(cos - margin) - 1).mean(1)
        order = np.argsort(-energy, kind="stable")[: 2 * r]
        a, b = order[::2], order[1::2]
        wanted = {int(i) + 1: int(b[cos[i, b].argmax()]) + 1 for i in a}
        got = dict(zip(plan.src[k].tolist(), plan.dst[k].tolist(), strict=True))
        assert got == wanted
        assert sorted(plan.keep[k].tolist()) == sorted(set(range(21)) - set(got))
    assert plan.unmerged.shape[1] == 0


def test_pitome_lowers_its_margin_layer_by_layer():
    x, attn, sizes, pos = inputs()
    state = tokens_of(x, sizes, pos)
    step = sre.PiToMe(5, n_layers=4).step(state, x, attn, 5, 2)
    wanted = sre.energy_merge(x, 5, margin=0.45)
    assert all(torch.equal(a, b) for a, b in zip(step.plan, wanted, strict=True))


def test_pruning_keeps_what_the_class_token_looks_at_and_fuses_the_rest():
    x, attn, _, pos = inputs(B=2)
    state = sre.start_tokens(x, pos)
    weight = attn[:, :, 0, 1:].mean(dim=1)
    out = sre.ClsPruning(8)(state, x, attn)
    bare = sre.ClsPruning(8, rest=False)(state, x, attn)
    assert out.x.shape[1] == bare.x.shape[1] == 13
    for k in range(2):
        order = weight[k].argsort(descending=True)
        kept = sorted(order[:11].tolist())
        assert torch.equal(out.x[k, 1:12], x[k, 1:][kept])
        rest = order[11:]
        fused = (weight[k, rest, None] * x[k, 1 + rest]).sum(0) / weight[k, rest].sum()
        torch.testing.assert_close(out.x[k, 12], fused)
        assert torch.equal(bare.x[k, 1:], x[k, 1:][sorted(order[:12].tolist())])
        assert (bare.source[k] == -1).sum() == 8
        gone = sre.unmerge(bare.x, bare.source)[k][bare.source[k] == -1]
        assert float(gone.abs().max()) == 0


def test_pooling_is_average_pooling():
    x = torch.randn(2, 1 + 24, 5, generator=g())
    out = sre.pool_tokens(x, (4, 6))
    wanted = torch.nn.functional.avg_pool2d(x[:, 1:].mT.reshape(2, 5, 4, 6), 2).flatten(2).mT
    torch.testing.assert_close(out.x[:, 1:], wanted)
    torch.testing.assert_close(
        sre.unmerge(out.x, out.source).mT.reshape(2, 5, 4, 6)[:, :, ::2, ::2].flatten(2).mT, wanted
    )
    assert out.sizes[0].tolist() == [1] + 6 * [4]
    assert out.pos[0, 0].tolist() == [0.5, 0.5]
    for grid in ((4, 5), (3, 8)):
        with pytest.raises(ValueError, match="grid must be even"):
            sre.pool_tokens(x, grid)


@pytest.mark.parametrize("name", ["nothing", "tome gamma=0", "sre speed=1", ""])
def test_unknown_mergers_are_refused(name):
    with pytest.raises(ValueError, match=r"name|not enough"):
        sre.make_merger(name, 1)


def test_options_of_a_name_arrive():
    made = sre.make_merger("sre gamma=0 partition=alternate weight=size kappa=1", 3)
    assert (made.gamma, made.partition, made.weight, made.kappa, made.beta) == (
        0, "alternate", "size", 1, 2,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------
# Model


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return sre.TinyViT((16, 12), 4, 16, 3, 2).eval()


def test_attention_to_a_token_of_size_three_is_attention_to_three_copies():
    torch.manual_seed(1)
    layer = sre.Attention(12, 3).double()
    x = torch.randn(2, 5, 12, generator=g(), dtype=F64)
    sizes = torch.tensor([[1.0, 1, 3, 1, 2]] * 2, dtype=F64)
    merged = layer(x, sizes)
    copies = layer(x[:, [0, 1, 2, 2, 2, 3, 4, 4]])
    torch.testing.assert_close(merged.out, copies.out[:, [0, 1, 2, 5, 6]])
    torch.testing.assert_close(merged.weights.sum(dim=3), torch.ones(2, 3, 5, dtype=F64))
    # also without weights, where the class row is one of them
    state = sre.start_tokens(x, torch.zeros(4, 2))._replace(sizes=sizes)
    many = sre.start_tokens(x[:, [0, 1, 2, 2, 2, 3, 4, 4]], torch.zeros(7, 2))
    one, all_ = sre.token_attention(state)[1], sre.token_attention(many)[1]
    torch.testing.assert_close(one[:, 0, :, 2], all_[:, 0, [0, 1, 2, 5, 6], 2:5].sum(dim=2))


def test_hooks_see_attention_and_keys(vit):
    seen = []
    hook = vit.blocks[1].attn.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    images = torch.rand(2, 3, 16, 12, generator=g())
    with torch.no_grad():
        vit(images)
    hook.remove()
    (x, _), out = seen[0]
    torch.testing.assert_close(out.weights.sum(dim=3), torch.ones(2, 2, 13))
    k = vit.blocks[1].attn.qkv(x)[..., 16:32].reshape(2, 13, 2, 8).mean(dim=2)
    torch.testing.assert_close(out.keys, k)


def test_a_merger_of_nothing_changes_nothing_and_a_patched_model_shares_weights(vit):
    images = torch.rand(2, 3, 16, 12, generator=g())
    with torch.no_grad():
        plain = vit(images).x
        assert torch.equal(sre.patch_vit(vit, sre.SREMerge(0))(images).x, plain)
        patched = sre.patch_vit(vit, sre.SREMerge(2))
        found = patched(images)
    assert vit.merger is None
    assert patched.blocks[0].attn.qkv.weight is vit.blocks[0].attn.qkv.weight
    assert found.x.shape == (2, 1 + 12 - 6, 16)
    assert found.sizes.sum(dim=1).tolist() == [13, 13]
    with pytest.raises(ValueError, match="model must be a TinyViT"):
        sre.patch_vit(torch.nn.Linear(2, 2), None)


def test_merging_happens_between_attention_and_mlp(vit):
    calls = []

    class Spy(sre.ToMe):
        def __call__(self, tokens, keys, attn, layer=0):
            calls.append((layer, tokens.x.clone(), keys, attn))
            return super().__call__(tokens, keys, attn, layer)

    images = torch.rand(1, 3, 16, 12, generator=g())
    with torch.no_grad():
        sre.patch_vit(vit, Spy(2))(images)
        x = vit.embed(images).flatten(2).mT
        x = torch.cat([vit.cls.expand(1, -1, -1), x], dim=1) + vit.where
        block = vit.blocks[0]
        after = x + block.attn(block.norm1(x)).out
    assert [c[0] for c in calls] == [0, 1, 2]
    torch.testing.assert_close(calls[0][1], after)
    assert calls[1][1].shape[1] == 11
    assert calls[1][3].shape == (1, 2, 11, 11)


def test_throughput_counts_pictures(vit):
    assert 0 < sre.throughput(vit, batch=2, repeats=2) < 1e7
    with pytest.raises(ValueError, match="batch and repeats"):
        sre.throughput(vit, batch=0)


def test_overlapping_patches_have_positions_closer_than_one():
    model = sre.TinyViT((256, 128), 16, 8, 1, 1, stride=12)
    assert model.grid == (21, 10)
    assert model.pos[1].tolist() == [0, 0.75]
    assert 1 + len(model.pos) == 211
    with pytest.raises(ValueError, match="heads must divide"):
        sre.TinyViT(dim=10, heads=4)
    with pytest.raises(ValueError, match="images must be"):
        model(torch.zeros(1, 3, 128, 256))


def test_flops_are_what_torch_counts():
    torch.manual_seed(0)
    model = sre.TinyViT((256, 128), 16, 192, 12, 3)
    images = torch.rand(1, 3, 256, 128)
    embed = 128 * 192 * 3 * 256
    for r, most in ((0, 0.0), (5, 0.01), (15, 0.01)):
        merger = sre.ToMe(r) if r else None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            sre.patch_vit(model, merger)(images)
        counted = counter.get_total_flops() / 2 - embed
        assert abs(counted / sre.vit_flops(129, 192, 12, r) - 1) <= most


def test_r_for_a_quarter_of_the_operations():
    assert sre.solve_r(129, 768, 12) == 5
    assert sre.solve_r(211, 768, 12) == 9
    for n, r, share in ((129, 5, 0.2424), (129, 4, 0.194), (211, 9, 0.269), (211, 8, 0.239)):
        saved = 1 - sre.vit_flops(n, 768, 12, r) / sre.vit_flops(n, 768, 12, 0)
        assert saved == pytest.approx(share, abs=6e-4)
    assert sre.solve_r(129, 768, 12, 0.0) == 0
    assert sre.vit_flops(1, 2, 1, 5) == 12 * 4 + 2 * 2
    with pytest.raises(ValueError, match="target must be at most"):
        sre.solve_r(129, 768, 12, 0.99)
    with pytest.raises(ValueError, match=r"target must be in \[0, 1\)"):
        sre.solve_r(129, 768, 12, 1.0)
    with pytest.raises(ValueError, match="r must be"):
        sre.vit_flops(129, 768, 12, -1)


# --------------------------------------------------------------------------------------------
# Measures


def test_ranking_metrics_agree_with_scikit_learn_and_with_counting():
    r = np.random.default_rng(0)
    scores = torch.from_numpy(r.normal(size=(15, 40)))
    q, gal = torch.from_numpy(r.integers(6, size=15)), torch.from_numpy(r.integers(6, size=40))
    cams = torch.from_numpy(r.integers(2, size=15)), torch.from_numpy(r.integers(2, size=40))
    got = sre.ranking_metrics(scores, q, gal, cams)
    precision, first, five, inp = [], [], [], []
    for i in range(15):
        valid = ~((gal == q[i]) & (cams[1] == cams[0][i]))
        s, y = scores[i][valid].numpy(), (gal[valid] == q[i]).numpy()
        precision.append(average_precision_score(y, s))
        ranks = np.flatnonzero(y[np.argsort(-s)]) + 1
        first.append(ranks[0] == 1)
        five.append(ranks[0] <= 5)
        inp.append(len(ranks) / ranks[-1])
    wanted = {"rank1": first, "rank5": five, "mAP": precision, "mINP": inp}
    for name, values in wanted.items():
        assert got[name] == pytest.approx(np.mean(values), rel=1e-12)


def test_reid_metrics_of_one_match_a_query_are_reciprocal_ranks():
    q = torch.eye(3)
    gal = torch.tensor([[1.0, 0, 0], [2.0, 1.9, 0], [0, 0, 1.0]])
    got = sre.reid_metrics(q, torch.arange(3), gal, torch.arange(3))
    assert got == {"rank1": 1.0, "rank5": 1.0, "mAP": 1.0, "mINP": 1.0}
    got = sre.reid_metrics(q, torch.arange(3), gal, torch.tensor([1, 0, 2]))
    assert got["mAP"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)  # the tie at 0 goes to the first
    with pytest.raises(ValueError, match="match for at least one"):
        sre.reid_metrics(q, torch.arange(3), gal, torch.full((3,), 9))
    with pytest.raises(ValueError, match="scores must be finite"):
        sre.ranking_metrics(torch.full((3, 3), math.nan), torch.arange(3), torch.arange(3))
    with pytest.raises(ValueError, match="gallery_feats"):
        sre.reid_metrics(q, torch.arange(3), gal[:, :2], torch.arange(3))


def test_maxsim_is_its_double_loop():
    a = torch.randn(3, 4, 5, generator=g(), dtype=F64)
    b = torch.randn(2, 6, 5, generator=g(1), dtype=F64)
    got = sre.maxsim(a, b)
    for i in range(3):
        for j in range(2):
            cos = torch.nn.functional.cosine_similarity(a[i][:, None], b[j][None], dim=2)
            wanted = cos.max(dim=1).values.mean() + cos.max(dim=0).values.mean()
            torch.testing.assert_close(got[i, j], wanted)
    torch.testing.assert_close(sre.maxsim(b, a), got.T)
    torch.testing.assert_close(sre.maxsim(a, a).diagonal(), torch.full((3,), 2.0, dtype=F64))
    with pytest.raises(ValueError, match="b must have 5 channels"):
        sre.maxsim(a, b[..., :4])


def test_recovery_is_one_for_kept_details_and_sees_the_best_token_only():
    x = torch.randn(2, 10, 6, generator=g(), dtype=F64)
    assert sre.detail_recovery(x[:, 3:5], 4 * x) == pytest.approx(1.0)
    e = torch.eye(3)[None]
    blend = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 0.1, 0.0]]])
    assert sre.detail_recovery(e[:, :1], blend) == pytest.approx(math.sqrt(0.5))
    with pytest.raises(ValueError, match="merged must be"):
        sre.detail_recovery(x, x[:1])


# --------------------------------------------------------------------------------------------
# Data


def test_pedestrians_wear_outfits_and_carry_one_detail_each():
    data = sre.make_pedestrian_tokens(30, 3, views=2)
    again = sre.make_pedestrian_tokens(30, 3, views=2)
    assert torch.equal(data.tokens, again.tokens)
    assert data.tokens.shape == (60, 128, 48)
    assert (data.detail_mask.sum(dim=1) == 4).all()
    assert data.ids[:30].sort().values.tolist() == list(range(30))
    assert data.ids[:30].tolist() != list(range(30))  # order tells nothing
    assert data.ids[:30].tolist() != data.ids[30:].tolist()
    mask = data.detail_mask.reshape(60, 16, 8)
    assert not mask[:, :, :2].any()
    assert not mask[:, :, 6:].any()
    grid = data.tokens.reshape(60, 16, 8, 48)
    same = (data.ids[:, None] - data.ids) % 12 == 0
    shirt = grid[:, 0, 3]  # no detail reaches the first row
    cos = torch.nn.functional.cosine_similarity(shirt[:, None], shirt[None], dim=2)
    assert float(cos[same].min()) > 0.7
    assert float(cos[~same].max()) < 0.7
    # two views of a person share the detail, up to a row, and not the background
    for k in range(30):
        first, second = (int((part == k).nonzero()) for part in (data.ids[:30], data.ids[30:]))
        a, b = (mask[i].nonzero()[0] for i in (first, 30 + second))
        assert abs(int(a[0] - b[0])) <= 2
        assert int(a[1]) == int(b[1])


def test_clutter_is_on_the_background_alone():
    plain = sre.make_pedestrian_tokens(5, 1).tokens.reshape(5, 16, 8, 48)
    messy = sre.make_pedestrian_tokens(5, 1, clutter=1.0).tokens.reshape(5, 16, 8, 48)
    gap = (plain - messy).norm(dim=3)
    assert float(gap[:, :, 2:6].max()) == 0
    assert float(gap[:, :, [0, 1, 6, 7]].mean()) == pytest.approx(math.sqrt(48), rel=0.05)
    for bad in ({"n_ids": 0}, {"views": 0}, {"clutter": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            sre.make_pedestrian_tokens(**bad)


def test_pictures_have_the_same_factors():
    ids, cameras = torch.tensor([3, 15, 3, 4]), torch.tensor([0, 0, 1, 0])
    x = sre.render_pedestrians(ids, cameras, seed=5)
    assert torch.equal(x, sre.render_pedestrians(ids, cameras, seed=5))
    assert x.shape == (4, 3, 64, 32)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    shirt = x[:, :, 3:6, 12:20].mean(dim=(2, 3))
    assert float((shirt[0] - shirt[1]).abs().max()) < 0.05  # 3 and 15 wear the same
    assert float((shirt[0] - shirt[3]).abs().max()) > 0.1
    light = torch.tensor([0.7, 0.75, 0.85])
    assert float((shirt[2] - light * shirt[0]).abs().max()) < 0.05
    for bad in (([10_000], [0]), ([1], [2]), ([1, 2], [0])):
        with pytest.raises(ValueError, match=r"ids|cameras"):
            sre.render_pedestrians(*map(torch.tensor, bad))


def test_training_lowers_the_loss_and_repeats_itself():
    def train():
        torch.manual_seed(0)
        model = sre.TinyViT(dim=32, depth=2, heads=2)
        return sre.train_reid(model, n_ids=4, steps=30, batch=16, lr=2e-3)

    first, again = train(), train()
    np.testing.assert_allclose(first, again, rtol=1e-5)
    assert first[-5:].mean() < 0.7 * first[:5].mean()


def test_image_run_measures_every_method():
    out = sre.image_run(steps=1, methods=("none", "sre"))
    assert set(out) == {
        "loss",
        *(f"{m}_{k}" for m in ("none", "sre") for k in ("rank1", "mAP", "cls")),
    }
    assert all(0 <= v <= 1 for k, v in out.items() if k != "loss")


def test_a_folder_in_the_layout_of_market_is_read(tmp_path):
    names = ["0002_c1s1_000451_03.jpg", "0007_c6s3_077817_01.jpg", "-1_c2s1_000001_01.jpg",
             "0000_c3s1_000151_01.jpg", "Thumbs.db"]  # fmt: skip
    for folder in sre.MARKET_SPLITS.values():
        (tmp_path / folder).mkdir()
    for k, name in enumerate(names):
        path = tmp_path / "bounding_box_test" / name
        if name.endswith("jpg"):
            Image.new("RGB", (8, 16), (40 * k, 0, 255)).save(path, quality=95)
        else:
            path.write_bytes(b"")
    data = sre.load_market1501(tmp_path, "gallery")
    assert data.ids.tolist() == [0, 2, 7]
    assert data.cameras.tolist() == [2, 0, 5]
    x = data.images([1, 2], size=(16, 8))
    assert x.shape == (2, 3, 16, 8)
    assert float((x[1, 0] - 40 / 255).abs().max()) < 0.03
    with pytest.raises(ValueError, match="root must hold pictures"):
        sre.load_market1501(tmp_path, "query")
    with pytest.raises(ValueError, match="split must be"):
        sre.load_market1501(tmp_path, "test")
    with pytest.raises(ValueError, match="root must hold the folder"):
        sre.load_market1501(tmp_path / "nowhere", "query")


# --------------------------------------------------------------------------------------------
# Experiments


def test_a_run_measures_what_its_name_says():
    out = sre.token_run("none", 0)
    assert out["tokens"] == 128
    assert out["recovery"] == pytest.approx(1.0)
    assert out["norm"] == out["variance"] == 1.0
    drop = sre.token_run("evit-drop", 0, retrieval=False)
    assert drop["recovery"] < 0.35
    assert "mAP" not in drop
    ours, tome = (sre.token_run(m, 0) for m in ("sre", "tome"))
    assert ours["tokens"] == tome["tokens"] == 30
    assert ours["recovery"] > tome["recovery"] + 0.08
    assert ours["far_1"] < tome["far_1"]


def test_study_runs_are_named():
    assert len(set(sre.RUNS)) == len(sre.RUNS)
    with pytest.raises(ValueError, match="run must be one of RUNS"):
        sre.study_run("sre|0|1|1|0")


def test_exercise_five_has_an_honest_bar():
    seen = []

    def same(x, attn, sizes, pos):
        seen.append(len(x))
        return sre.spatial_entropic_mass(x, attn, sizes, pos)

    with pytest.raises(AssertionError, match=r"must rise from 0\.\d+ by 0\.05"):
        sre.check_clutter(same)
    assert seen


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton exists on Linux only")
@pytest.mark.parametrize(
    ("target", "units"),
    [
        ("sm_80", "HMMA"),
        ("sm_90", "HGMMA"),
        ("sm_100", "UTCHMMA"),
        ("gfx942", "v_mfma_f32"),
    ],
)
@pytest.mark.parametrize("form", ["fp16 d=64", "fp16 d=768"])
def test_float16_matching_runs_on_matrix_units_with_wide_loads(form, target, units):
    made = aot.compile_program("match_scores", form, target)
    assert units in made.assembly
    # NVIDIA's rows come by asynchronous copies to shared memory
    wide = r"\bLDGSTS\S*\.128\b" if target.startswith("sm_") else r"_load_dwordx4\b"
    assert re.search(wide, made.assembly)
