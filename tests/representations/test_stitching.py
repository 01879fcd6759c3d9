"""Stitches, inversions, both compatibilities and the linear theorem."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.representations import stitching as st

F32, F64 = torch.float32, torch.float64


def g(seed=0):
    return torch.Generator().manual_seed(seed)


def small(seed=0, width=9, dtype=F64, n_in=6, n_classes=4):
    """A random classifier: n_in → width ReLU | width ReLU → n_classes."""
    torch.manual_seed(seed)
    layers = [nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(8, n_classes)).to(dtype)
    return st.SplitModel(*st.split_at(net, 2), layers=(1, 2))


def rows(n=40, n_in=6, n_classes=4, dtype=F64, seed=1):
    x = torch.rand(n, n_in, generator=g(seed), dtype=F64).to(dtype)
    return x, torch.randint(n_classes, (n,), generator=g(seed))


# --------------------------------------------------------------------------------------------
# Stitches


@pytest.mark.parametrize("dtype", [F32, F64])
def test_an_affine_stitch_on_maps_is_a_1x1_convolution(dtype):
    T = st.AffineStitch(3, 5, F.relu).to(dtype)
    z = torch.randn(2, 3, 4, 6, dtype=dtype, generator=g())
    conv = F.conv2d(z, T.linear.weight[:, :, None, None], T.linear.bias).relu()
    assert torch.allclose(T(z), conv, atol=1e-6)
    assert torch.allclose(T(z[:, :, 0, 0]), T(z)[:, :, 0, 0], atol=1e-6)
    assert float(T(z).detach().min()) == 0


def test_bad_widths_and_shapes_of_a_stitch_are_named():
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="k_in must be a whole number"):
            st.AffineStitch(bad, 2)
    with pytest.raises(ValueError, match=r"z must be \(n, 3\)"):
        st.AffineStitch(3, 2)(torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"z must be \(n, 3\)"):
        st.AffineStitch(3, 2)(torch.zeros(4, 3, 2))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_slm_is_the_ridge_solution_of_scikit_learn(dtype):
    from sklearn.linear_model import Ridge

    A, B = small(0, dtype=dtype), small(1, width=7, dtype=dtype)
    x, y = rows(60, dtype=dtype)
    T = st.fit_stitch(A, B, x, y, "slm", rho=0.3)
    with torch.no_grad():
        za, zb = A.front(x).double().numpy(), B.front(x).double().numpy()
    ridge = Ridge(alpha=0.3).fit(za, zb)
    tolerance = 1e-9 if dtype == F64 else 1e-4
    assert np.abs(T.linear.weight.numpy() - ridge.coef_).max() < tolerance
    assert np.abs(T.linear.bias.numpy() - ridge.intercept_).max() < tolerance
    assert T.linear.weight.dtype == dtype


def test_slm_survives_dead_sender_units_and_differs_in_width():
    A, B = small(0), small(1, width=5)
    with torch.no_grad():
        A.front[0].weight[0] = 0
        A.front[0].bias[0] = -1
    x, y = rows()
    T = st.fit_stitch(A, B, x, y, "slm")
    assert T.linear.weight.shape == (5, 9)
    assert bool(torch.isfinite(T.linear.weight).all())
    assert float(T.linear.weight[:, 0].abs().max()) == 0  # ρ leaves nothing on a dead unit


def loss_of(objective, A, B, T, x, y, beta):
    """Each objective from its definition, over all rows, without the module's own pieces."""
    with torch.no_grad():
        t = F.relu(F.linear(A.front(x), T.linear.weight, T.linear.bias))
        zb, logits, stitched = B.front(x), B(x), B.head(t)

        def var(z):
            return (z - z.mean(0)).square().sum() / len(z)

        if objective == "task":
            return -stitched.log_softmax(1)[torch.arange(len(y)), y].mean()
        if objective == "output":
            p = logits.softmax(1)
            return (p * (p.log() - stitched.log_softmax(1))).sum(1).mean()
        if objective == "fula":
            h, hb = B.head[:2](t), B.head[:2](zb)
            pairs = [(t, zb), (h, hb), (stitched, logits)]
            return sum((a - b).square().sum(1).mean() / var(b) for a, b in pairs) / 3
        task = -stitched.log_softmax(1)[torch.arange(len(y)), y].mean()
        return task + beta * (t - zb).square().sum(1).mean() / var(zb)


@pytest.mark.parametrize("objective", ["task", "output", "fula", "invariance"])
def test_the_loss_is_the_one_of_the_definition(objective):
    A, B = small(0), small(1)
    x, y = rows()
    with torch.no_grad():
        layers = B.trace(B.front(x))
    T = st.fit_stitch(A, B, x, y, objective, epochs=0, generator=g(3))
    loss = st._stitch_loss(objective, B, layers, y, 0.7)
    index = torch.arange(len(x))
    with torch.no_grad():
        got = loss(T(A.front(x)), index)
        part = loss(T(A.front(x[:7])), index[:7])
    assert math.isclose(float(got), float(loss_of(objective, A, B, T, x, y, 0.7)), rel_tol=1e-12)
    # the normaliser is that of the whole set, not of a batch
    whole = float(got) * len(x)
    with torch.no_grad():
        rest = loss(T(A.front(x[7:])), index[7:])
    assert math.isclose(7 * float(part) + 33 * float(rest), whole, rel_tol=1e-12)


@pytest.mark.parametrize("objective", st.OBJECTIVES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_fitting_lowers_the_loss_and_leaves_both_networks_alone(objective, dtype):
    A, B = small(0, dtype=dtype), small(1, dtype=dtype)
    B.front[0].weight.requires_grad_(False)
    x, y = rows(dtype=dtype)
    before = [(p.clone(), p.requires_grad) for m in (A, B) for p in m.parameters()]
    state = torch.get_rng_state()
    start = st.fit_stitch(A, B, x, y, "invariance" if objective == "slm" else objective, epochs=0)
    T = st.fit_stitch(A, B, x, y, objective, epochs=30)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(p, old) and p.requires_grad == flag and p.grad is None
        for p, (old, flag) in zip([p for m in (A, B) for p in m.parameters()], before, strict=True)
    )
    assert A.training
    assert not any(p.requires_grad for p in T.parameters())
    if objective != "slm":
        first, last = (loss_of(objective, A, B, t, x, y, 1.0) for t in (start, T))
        assert last < first


def test_the_same_generator_gives_the_same_stitch_and_another_seed_another():
    A, B = small(0), small(1)
    x, y = rows()
    fits = [st.fit_stitch(A, B, x, y, "task", epochs=2, generator=g(s)) for s in (4, 4, 5)]
    assert torch.equal(fits[0].linear.weight, fits[1].linear.weight)
    assert not torch.equal(fits[0].linear.weight, fits[2].linear.weight)


def test_invariance_starts_at_the_slm_solution_and_beta_weighs_the_latent_term():
    A, B = small(0), small(1)
    x, y = rows()
    slm = st.fit_stitch(A, B, x, y, "slm")
    start = st.fit_stitch(A, B, x, y, "invariance", epochs=0)
    assert torch.equal(slm.linear.weight, start.linear.weight)

    def latent(beta):
        T = st.fit_stitch(A, B, x, y, "invariance", beta=beta, epochs=60, lr=1e-2)
        with torch.no_grad():
            return float((T(A.front(x)) - B.front(x)).square().sum())

    assert latent(100.0) < latent(1.0) < latent(0.0)


@pytest.fixture
def recipe(monkeypatch):
    """What a fit hands to the descent, in place of descending."""
    seen = []

    def descend(stitch, z_a, loss, epochs, lr, batch_size, generator):
        seen.append((stitch.linear.weight.detach().clone(), epochs, lr, batch_size))

    monkeypatch.setattr(st, "_descend", descend)
    return seen


@pytest.mark.parametrize("objective", ["task", "output", "fula", "invariance"])
def test_each_objective_has_its_own_start_passes_and_rate(recipe, objective):
    A, B = small(0), small(1)
    x, y = rows()
    slm = st.fit_stitch(A, B, x, y, "slm").linear.weight
    st.fit_stitch(A, B, x, y, objective)
    ((weight, epochs, lr, batch),) = recipe
    from_slm = objective == "invariance"
    assert (epochs, lr, batch) == ((20, 1e-3, 64) if from_slm else (60, 3e-3, 64))
    assert torch.equal(weight, slm) == from_slm
    if not from_slm:  # as nn.Linear draws: uniform up to 1/√k_A
        assert 0.25 < float(weight.abs().max()) <= 1 / 3


@pytest.mark.filterwarnings("ignore:the ceiling")
def test_a_random_start_of_the_invariance_objective_takes_larger_steps(recipe):
    how = {"sender": "shape 1", "receiver": "shape 2", "seed": 0, "objective": "invariance"}
    for start in (None, "random"):
        st.pair_run(**how, start=start, short=True, n_test=20, steps=1)
    assert [lr for _, _, lr, _ in recipe] == [1e-3, 1e-2]


def test_batchnorm_is_in_evaluation_mode_while_a_stitch_is_fitted():
    torch.manual_seed(0)
    parts = [nn.Linear(6, 9), nn.ReLU(), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4)]
    B = st.SplitModel(*st.split_at(nn.Sequential(*parts).double(), 2))
    x, y = rows()
    before = {k: v.clone() for k, v in B.state_dict().items()}
    first, again = (st.fit_stitch(small(0), B, x, y, "task", epochs=3) for _ in range(2))
    assert torch.equal(first.linear.weight, again.linear.weight)  # no dropout
    assert all(torch.equal(before[k], v) for k, v in B.state_dict().items())
    assert B.training


def test_maps_are_stitched_place_by_place():
    torch.manual_seed(0)

    def conv(width):
        parts = [
            nn.Conv2d(2, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * width, 3),
        ]
        return st.SplitModel(*st.split_at(nn.Sequential(*parts).double(), 2))

    A, B = conv(3), conv(4)
    x = torch.rand(20, 2, 4, 4, generator=g(), dtype=F64)
    y = torch.randint(3, (20,), generator=g())
    T = st.fit_stitch(A, B, x, y, "slm")
    with torch.no_grad():
        za = A.front(x).permute(0, 2, 3, 1).reshape(-1, 3)
        zb = B.front(x).permute(0, 2, 3, 1).reshape(-1, 4)
    from sklearn.linear_model import Ridge

    assert np.allclose(T.linear.weight, Ridge(alpha=1e-2).fit(za, zb).coef_, atol=1e-9)
    found = st.invert(B.front, T(A.front(x)).detach(), x.flip(0), steps=5)
    assert found.x.shape == x.shape
    assert found.trace[-1] < found.trace[0]


BAD_FITS = [
    ({"objective": "slim"}, "objective must be one of"),
    ({"start": "zero"}, "start must be 'slm' or 'random'"),
    ({"beta": -0.1}, "beta must be finite and >= 0"),
    ({"beta": math.nan}, "beta must be finite and >= 0"),
    ({"rho": 0.0}, "rho must be finite and > 0"),
    ({"epochs": -1}, "epochs must be >= 0"),
    ({"batch_size": 0}, "batch_size >= 1"),
    ({"lr": 0.0}, "lr finite and > 0"),
    ({"x": torch.zeros(0, 6, dtype=F64), "y": torch.zeros(0, dtype=torch.int64)}, "x must hold"),
    ({"y": torch.full((40,), 4)}, r"y must lie in 0\.\.3"),
    ({"y": torch.full((40,), -1)}, r"y must lie in 0\.\.3"),
    ({"y": torch.zeros(39, dtype=torch.int64)}, r"y must be \(40,\) whole numbers"),
    ({"y": torch.zeros(40)}, r"y must be \(40,\) whole numbers"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_FITS)
def test_bad_arguments_of_fit_stitch_are_named(changed, message):
    x, y = rows()
    with pytest.raises(ValueError, match=message):
        st.fit_stitch(**{"A": small(0), "B": small(1), "x": x, "y": y, **changed})


def test_a_receiver_without_variance_and_features_of_other_rows_are_refused():
    x, y = rows()
    same = x[:1].repeat(40, 1)
    for objective in ("fula", "invariance"):
        with pytest.raises(ValueError, match=r"x must give .* some variance"):
            st.fit_stitch(small(0), small(1), same, y, objective)
    with pytest.raises(ValueError, match="A must hold one row of features an input"):
        st.fit_stitch(torch.zeros(39, 3, dtype=F64), small(1), x, y, "slm")
    # one class is no obstacle
    st.fit_stitch(small(0), small(1), x, torch.zeros_like(y), "task", epochs=1)


# --------------------------------------------------------------------------------------------
# Inversion


@pytest.mark.parametrize("dtype", [F32, F64])
def test_inversion_follows_adam_with_a_projection_written_out(dtype):
    front = small(0, dtype=dtype).front
    x, _ = rows(dtype=dtype)
    with torch.no_grad():
        target = front(x)
    x0 = x.roll(1, dims=0)
    found = st.invert(front, target, x0, steps=25, lr=0.05, bounds=(0.1, 0.8), keep=(0, 10, 25))
    u = x0.clamp(0.1, 0.8).requires_grad_(True)
    adam = torch.optim.Adam([u], lr=0.05)
    variance = target.var(dim=0, correction=0).sum()
    trace = []
    for _ in range(26):
        each = (front(u) - target).square().sum(dim=1) / variance
        trace.append(float(each.detach().mean()))
        last = u.detach().clone()
        adam.zero_grad()
        each.sum().backward()
        adam.step()
        with torch.no_grad():
            u.clamp_(0.1, 0.8)
    tolerance = 1e-10 if dtype == F64 else 2e-4
    assert torch.allclose(found.x, last, atol=tolerance)
    assert np.allclose(found.trace, trace, atol=tolerance)
    assert torch.allclose(found.path[0], x0.clamp(0.1, 0.8))
    assert torch.equal(found.path[-1], found.x)
    assert 0.1 - 1e-6 <= float(found.x.min()) <= float(found.x.max()) <= 0.8 + 1e-6
    assert found.residual.dtype == F64
    assert math.isclose(float(found.residual.mean()), float(found.trace[-1]), rel_tol=1e-6)


def test_rows_do_not_see_one_another():
    front = small(0).front
    x, _ = rows()
    with torch.no_grad():
        target = front(x)
    variance = st.target_variance(target)
    x0 = x.flip(0)
    whole = st.invert(front, target, x0, steps=20, variance=variance)
    part = st.invert(front, target[5:9], x0[5:9], steps=20, variance=variance)
    assert torch.allclose(whole.x[5:9], part.x, atol=1e-12)
    # the unit is the whole set's: without it a part has a unit of its own
    alone = st.invert(front, target[5:9], x0[5:9], steps=20)
    ratio = variance / st.target_variance(target[5:9])
    assert torch.allclose(alone.residual, part.residual * ratio, rtol=0.2)
    assert not torch.allclose(alone.residual, part.residual, rtol=1e-3)


def test_no_steps_give_the_start_back_and_the_front_is_left_alone():
    B = small(0)
    x, _ = rows()
    x0 = x.flip(0)
    start = x0.clone()
    before = [p.clone() for p in B.parameters()]
    with torch.no_grad():  # also where gradients are off
        target = B.front(x)
        found = st.invert(B.front, target, x0, steps=0)
        moved = st.invert(B.front, target, x0, steps=3)
    assert torch.equal(found.x, x0)
    assert torch.equal(x0, start)
    assert not torch.equal(moved.x, x0)
    assert all(
        torch.equal(p, q) and p.grad is None for p, q in zip(B.parameters(), before, strict=True)
    )


def test_target_variance_is_the_trace_of_the_covariance_without_dead_units():
    t = torch.randn(50, 4, generator=g(), dtype=F64)
    cov = np.cov(t.numpy().T, bias=True)
    assert math.isclose(st.target_variance(t), np.trace(cov), rel_tol=1e-12)
    dead = torch.cat([t, torch.full((50, 2), 7.0, dtype=F64)], dim=1)
    assert math.isclose(st.target_variance(dead), np.trace(cov), rel_tol=1e-12)
    faint = torch.cat([t, 1e-5 * t[:, :1]], dim=1)
    assert st.target_variance(faint) == st.target_variance(t)


@pytest.mark.parametrize("target", [torch.ones(5, 3), torch.ones(1, 3), torch.zeros(4, 2)])
def test_targets_without_variance_are_refused(target):
    with pytest.raises(ValueError, match="target must have some variance"):
        st.target_variance(target)


def test_bad_arguments_of_invert_are_named():
    front = small(0).front
    x, _ = rows()
    with torch.no_grad():
        target = front(x)
    for changed, message in [
        ({"bounds": (1.0, 0.0)}, "bounds must be"),
        ({"bounds": (0.5, 0.5)}, "bounds must be"),
        ({"steps": -1}, "steps must be a whole number"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"lr": 0.0}, "lr finite and > 0"),
        ({"target": target[:, :3]}, "target must be"),
        ({"target": target[:-1]}, "target must be"),
        ({"variance": 0.0}, "variance must be finite and > 0"),
        ({"keep": (0, 500)}, "keep must hold steps"),
        ({"x0": x[:0]}, "x0 must hold at least one row"),
    ]:
        with pytest.raises(ValueError, match=message):
            st.invert(**{"front": front, "target": target, "x0": x.flip(0), **changed})


def test_total_variation_by_hand_and_as_a_prior():
    x = torch.tensor([[[[0.0, 1.0], [2.0, 4.0]]]])
    assert float(st.total_variation(x)) == pytest.approx((2 + 3) / 2 + (1 + 2) / 2)
    assert float(st.total_variation(torch.full((1, 3, 4, 4), 0.7))) == 0
    with pytest.raises(ValueError, match="x must be images"):
        st.total_variation(torch.zeros(3, 4))
    torch.manual_seed(0)
    front = nn.Sequential(nn.Flatten(), nn.Linear(36, 2)).double()
    images, x0 = torch.rand(2, 5, 1, 6, 6, generator=g(), dtype=F64)
    target = front(images).detach()
    plain, smooth = (
        st.invert(front, target, x0, steps=60, prior=p)
        for p in (None, lambda v: 0.2 * st.total_variation(v))
    )
    assert (st.total_variation(smooth.x) < st.total_variation(plain.x)).all()


# --------------------------------------------------------------------------------------------
# Compatibility


@pytest.fixture(scope="module")
def world():
    return st.cue_models(0, True), st.cue_world(0, 150)


def test_a_model_stitched_to_itself_is_itself_both_ways(world):
    nets, data = world
    A = nets["shape 1"].split()
    T = st.identity_stitch(A, data.x_test)
    stitched = st.StitchedModel(A.front, A.head, T)
    with torch.no_grad():
        assert torch.equal(stitched(data.x_test), A(data.x_test))
    report = st.invariance_aware_similarity(A, A, T, data.x_test, data.y_test, data.x0, steps=100)
    assert report.fc == 1
    assert report.bc == report.ceiling == report.shared_invariance
    assert report.fc_norm == report.bc_norm == report.ias == 1
    assert not report.off_image


def test_networks_in_training_mode_are_measured_in_evaluation_mode_and_left_as_they_were():
    torch.manual_seed(0)
    parts = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5)]
    B = st.SplitModel(*st.split_at(nn.Sequential(*parts, nn.Linear(9, 4)).double(), 4))
    x, y = rows()
    T, before = st.identity_stitch(B, x), {k: v.clone() for k, v in B.state_dict().items()}
    B.eval()
    with torch.no_grad():
        right, target = float((B(x).argmax(1) == y).double().mean()), B.front(x)
    still = st.invert(B.front, target, x, steps=4)
    B.train()
    assert st.forward_compatibility(B, B, T, x, y) == (right, right, 1.0)
    assert torch.equal(st.invert(B.front, target, x, steps=4).x, still.x)
    assert float(still.trace[0]) < 1e-20  # x is its own inversion, where nothing is dropped
    first, again = (st.backward_compatibility(B, B, T, x, x.flip(0), steps=3) for _ in range(2))
    assert first[:-1] == again[:-1]
    assert B.training
    assert all(torch.equal(before[k], v) for k, v in B.state_dict().items())


def test_report_agrees_with_its_definitions(world):
    nets, data = world
    A, B = nets["shape 1"].split(), nets["both"].split()
    T = st.fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
    x, y, x0 = data.x_test, data.y_test, data.x0
    report = st.invariance_aware_similarity(A, B, T, x, y, x0, steps=60)
    with torch.no_grad():
        t = T(A.front(x))
        accuracy = float((B.head(t).argmax(1) == y).double().mean())
        receiver = float((B(x).argmax(1) == y).double().mean())
        found = st.invert(B.front, t, x0, steps=60)
        said, again = A(x).argmax(1), A(found.x).argmax(1)
        own = st.invert(B.front, B.front(x), x0, steps=60)
        ceiling = float((B(own.x).argmax(1) == B(x).argmax(1)).double().mean())
        shared = float((A(own.x).argmax(1) == said).double().mean())
        bc = float((said == again).double().mean())
        p, q = (np.bincount(v, minlength=10) / len(v) for v in (said, again))
        check = float((B(found.x).argmax(1) == B.head(t).argmax(1)).double().mean())
        start = float((A(x0).argmax(1) == said).double().mean())
    chance = float(p @ q)
    fc_norm = min(max((accuracy - 0.1) / (receiver - 0.1), 0), 1)
    bc_norm = min(max((bc - chance) / (ceiling - chance), 0), 1)
    expected = {
        "accuracy": accuracy, "receiver": receiver, "fc": accuracy / receiver, "bc": bc,
        "fc_norm": fc_norm, "bc_norm": bc_norm, "ias": 2 / (1 / fc_norm + 1 / bc_norm),
        "reach": float(found.residual.mean()), "self_check": check, "chance": chance,
        "start": start, "ceiling": ceiling, "shared_invariance": shared,
    }  # fmt: skip
    for field, value in expected.items():
        assert getattr(report, field) == pytest.approx(value, abs=1e-9), field
    assert report.off_image == (report.reach > 0.05)
    # the same inversion given in advance gives the same report
    assert report == st.invariance_aware_similarity(A, B, T, x, y, x0, steps=60, found=own)


def test_both_cues_pass_forward_and_only_the_same_cue_passes_backward(world):
    nets, data = world
    for a, b, low, high in [
        ("shape 1", "shape 2", 0.8, 1.0),
        ("colour 1", "colour 2", 0.95, 1.0),
        ("shape 1", "colour 2", 0.0, 0.25),
        ("colour 1", "shape 2", 0.0, 0.25),
    ]:
        A, B = nets[a].split(), nets[b].split()
        T = st.fit_stitch(A, B, data.x_stitch, data.y_stitch, "invariance")
        found = st.invariance_aware_similarity(A, B, T, data.x_test, data.y_test, data.x0)
        assert found.accuracy > 0.75
        assert low <= found.bc <= high, (a, b, found.bc)
        assert found.reach < 0.06
        assert found.ias >= 0.75 if a.split()[0] == b.split()[0] else found.ias <= 0.3


def test_an_inversion_that_starts_at_x_says_yes_to_every_pair_and_is_refused(world):
    nets, data = world
    A, B = nets["colour 1"].split(), nets["shape 2"].split()
    T = st.fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
    with torch.no_grad():
        target = T(A.front(data.x_test))
        found = st.invert(B.front, target, data.x_test)
        same = float((A(found.x).argmax(1) == A(data.x_test).argmax(1)).double().mean())
    assert same > 0.9
    for call in (
        lambda: st.backward_compatibility(A, B, T, data.x_test, data.x_test),
        lambda: st.shared_invariance(A, B, data.x_test, data.x_test),
    ):
        with pytest.raises(ValueError, match="x0 must differ from x in every row: 150 of 150"):
            call()
    one = data.x0.clone()
    one[3] = data.x_test[3]
    with pytest.raises(ValueError, match="1 of 150"):
        st.metamers(B, data.x_test, one)


def test_a_sender_without_a_network_has_forward_numbers_only(world):
    nets, data = world
    B = nets["shape 2"].split()
    means = torch.randn(10, 64, generator=g(5), dtype=F64)
    fit_on = st.clustered_noise(data.y_stitch, generator=g(6), means=means)
    test_on = st.clustered_noise(data.y_test, generator=g(7), means=means)
    T = st.fit_stitch(fit_on, B, data.x_stitch, data.y_stitch, "task")
    report = st.invariance_aware_similarity(
        test_on, B, T, data.x_test, data.y_test, data.x0, steps=20
    )
    assert report.accuracy > 0.95  # noise around class means is stitched into a classifier
    for field in ("bc", "bc_norm", "ias", "reach", "self_check", "chance", "start"):
        assert math.isnan(getattr(report, field)), field
    with pytest.raises(ValueError, match="A must be a SplitModel"):
        st.backward_compatibility(test_on, B, T, data.x_test, data.x0)


class Constant(nn.Module):
    """A head that always says one class."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, z):
        return F.one_hot(torch.full((len(z),), self.k), 10).double()


def test_a_receiver_at_or_below_chance_gives_no_forward_scale(world):
    nets, data = world
    A = nets["shape 1"].split()
    keep = data.y_test != 3  # the receiver says 3, so it is never right
    x, y, x0 = data.x_test[keep], data.y_test[keep], data.x0[keep]
    never = st.SplitModel(A.front, nn.Sequential(Constant(3)))
    T = st.identity_stitch(A, x)
    with pytest.warns(UserWarning, match="receiver's accuracy 0.000 is not above 1/C = 0.100"):
        report = st.invariance_aware_similarity(A, never, T, x, y, x0, steps=10)
    assert math.isnan(report.fc_norm)
    assert math.isnan(report.fc)
    assert math.isnan(report.ias)


def test_a_constant_sender_leaves_no_room_above_chance(world):
    nets, data = world
    shape = nets["shape 1"].split()
    constant = st.SplitModel(shape.front, nn.Sequential(Constant(0)))
    T = st.identity_stitch(shape, data.x_test)
    with pytest.warns(UserWarning, match=r"within 0\.05 of chance"):
        report = st.invariance_aware_similarity(
            constant, shape, T, data.x_test, data.y_test, data.x0, steps=10
        )
    assert report.bc == report.chance == 1
    assert math.isnan(report.bc_norm)
    assert math.isnan(report.ias)


@pytest.mark.parametrize(("ceiling", "scored"), [(0.17, True), (0.15, False), (0.05, False)])
def test_a_ceiling_needs_room_above_chance(world, monkeypatch, ceiling, scored):
    nets, data = world
    A, x = nets["shape 1"].split(), data.x_test
    T, found = st.identity_stitch(A, x), st.metamers(A, x, data.x0, steps=0)
    weak = st.BackwardResult(0.14, 0.01, 1.0, 0.11, 0.1, found)
    monkeypatch.setattr(st, "backward_compatibility", lambda *_, **__: weak)
    monkeypatch.setattr(st, "shared_invariance", lambda *_, **__: ceiling)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = st.invariance_aware_similarity(A, A, T, x, data.y_test, data.x0, found=found)
    assert bool(told) != scored
    assert math.isnan(report.bc_norm) != scored
    if scored:
        assert report.bc_norm == pytest.approx((0.14 - 0.11) / (0.17 - 0.11))


def test_a_reach_above_its_limit_is_flagged(world):
    found = st.InversionResult(*torch.zeros(4, 1))
    for reach, flagged in ((0.05, False), (0.051, True), (math.nan, True)):
        assert st.BackwardResult(1.0, reach, 1.0, 0.1, 0.1, found).off_image == flagged


def test_the_symmetric_score_is_the_mean_of_both_directions():
    def report(ias):
        fields = dict.fromkeys(st.Report.__dataclass_fields__, 0.0)
        return st.Report(**{**fields, "ias": ias})

    ias = {("a", "a"): 1.0, ("a", "b"): 0.2, ("b", "a"): 0.6, ("b", "b"): 1.0}
    matrix = st.SimilarityMatrix(("a", "b"), {pair: report(v) for pair, v in ias.items()})
    assert matrix.table("ias")[0, 1] == 0.2  # senders down
    assert np.allclose(matrix.symmetric(), [[1, 0.4], [0.4, 1]])


def test_harmonic_similarity():
    assert st.harmonic_similarity(1, 0.5) == pytest.approx(2 / 3)
    assert st.harmonic_similarity(0.3, 0.3) == pytest.approx(0.3)
    assert st.harmonic_similarity(0, 1) == st.harmonic_similarity(0, 0) == 0
    assert math.isnan(st.harmonic_similarity(math.nan, 0))
    with pytest.raises(ValueError, match=r"bc_norm must lie in \[0, 1\]: got 1.1"):
        st.harmonic_similarity(0.5, 1.1)


def test_similarity_matrix_has_every_ordered_pair_and_ones_on_its_diagonal(world):
    nets, data = world
    models = {name: nets[name].split() for name in ("shape 1", "shape 2", "colour 1")}
    found = st.similarity_matrix(models, data, "slm", steps=60)
    assert found.names == ("shape 1", "shape 2", "colour 1")
    ias = found.table("ias")
    assert np.array_equal(np.diag(ias), np.ones(3))
    assert ias[0, 1] > 0.7 > 0.3 > ias[0, 2]
    assert np.array_equal(found.symmetric(), found.symmetric().T)
    assert found.symmetric()[0, 2] == pytest.approx((ias[0, 2] + ias[2, 0]) / 2)
    with pytest.raises(ValueError, match="field must be one of"):
        found.table("nope")
    with pytest.raises(ValueError, match="models must name at least one"):
        st.similarity_matrix({}, data)


def test_a_found_inversion_of_other_rows_is_refused(world):
    nets, data = world
    A = nets["shape 1"].split()
    found = st.metamers(A, data.x_test[:9], data.x0[:9], steps=1)
    with pytest.raises(ValueError, match="found must hold a metamer for each row"):
        st.shared_invariance(A, A, data.x_test, data.x0, found=found)


# --------------------------------------------------------------------------------------------
# The linear theorem


@pytest.mark.parametrize("seed", range(10))
def test_the_defects_vanish_exactly_where_the_null_spaces_are_included(seed):
    equal, nested, apart = (st.linear_draw(case, seed) for case in st.LINEAR_CASES)
    assert max(equal) < 1e-20
    assert nested.forward_defect < 1e-24
    assert nested.forward_error < 1e-20
    assert nested.backward_defect > 1e-2
    assert nested.backward_error > 1e-2
    assert min(apart) > 1e-2


def test_defects_by_hand():
    # A reads inputs 0 and 1, B inputs 1 and 2, with weights
    G_A = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    G_B = torch.tensor([[0, 3.0, 0], [0, 0, 4]])
    f, r = st.linear_compatibility(G_A, G_B)
    assert f == pytest.approx(16 / 25)
    assert r == pytest.approx(1 / 2)


def test_forward_defect_is_the_residual_of_the_best_linear_stitch():
    rng = np.random.default_rng(0)
    G_A, G_B = rng.normal(size=(3, 7)), rng.normal(size=(4, 7))
    W = np.linalg.lstsq(G_A.T, G_B.T, rcond=None)[0].T
    f, r = st.linear_compatibility(G_A, G_B)
    assert f == pytest.approx(((W @ G_A - G_B) ** 2).sum() / (G_B**2).sum(), rel=1e-10)
    assert st.linear_compatibility(G_B, G_A) == pytest.approx((r, f), rel=1e-10)


def test_disjoint_cues_agree_on_the_data_and_not_at_all_off_it():
    k, n = 3, 200
    G_A, G_B = np.eye(2 * k)[:k], np.eye(2 * k)[k:]
    half = np.random.default_rng(0).normal(size=(n, k))
    x = np.hstack([half, half])  # the cues agree
    W = np.linalg.lstsq(x @ G_A.T, x @ G_B.T, rcond=None)[0]
    assert np.abs(x @ G_A.T @ W - x @ G_B.T).max() < 1e-12
    assert st.linear_compatibility(G_A, G_B) == pytest.approx((1, 1))


def test_nearest_inversion_is_seen_alike_and_is_the_nearest():
    rng = np.random.default_rng(1)
    G_B = torch.from_numpy(rng.normal(size=(3, 8)))
    x, x0 = (torch.from_numpy(rng.normal(size=(5, 8))) for _ in range(2))
    found = st.nearest_inversion(G_B, x, x0)
    assert torch.allclose(found @ G_B.T, x @ G_B.T, atol=1e-12)
    null = torch.linalg.svd(G_B)[2][3:]
    assert float(((found - x0) @ null.T).abs().max()) < 1e-12  # nothing moved that B can't see


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 3)), np.full((2, 3), np.nan), np.ones(3), np.ones((0, 3))]
)
def test_matrices_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="G_A must be a finite matrix"):
        st.linear_compatibility(bad, np.ones((2, 3)))
    with pytest.raises(ValueError, match="G_A and G_B must read the same inputs: got 3 and 4"):
        st.linear_compatibility(np.ones((2, 3)), np.ones((2, 4)))


# --------------------------------------------------------------------------------------------
# Data, networks, studies


def test_small_net_has_the_layers_of_the_text_and_leaves_the_global_generator():
    state = torch.get_rng_state()
    net, again, other = st.SmallNet(16, seed=3), st.SmallNet(16, seed=3), st.SmallNet(16, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(m).__name__ for m in net] == ["Linear", "ReLU"] * 3 + ["Linear"]
    assert net[0].weight.shape == (16, 192)
    assert net[6].weight.shape == (10, 16)
    assert torch.equal(net[0].weight, again[0].weight)
    assert not torch.equal(net[0].weight, other[0].weight)
    x = torch.rand(4, 192, dtype=F64)
    for layer, traced in ((1, 4), (2, 3), (3, 2)):
        split = net.split(layer)
        assert torch.equal(split(x), net(x))
        assert len(split.trace(split.front(x))) == traced
    for bad in (0, 4):
        with pytest.raises(ValueError, match="layer must be 1, 2 or 3"):
            net.split(bad)
    with pytest.raises(ValueError, match="width must be a whole number"):
        st.SmallNet(0)


def test_trained_networks_read_their_cue_and_ignore_the_other(world):
    nets, data = world
    digit = data.y_test
    colour = torch.randint(10, digit.shape, generator=g(1))
    torn = st.recoloured(data.x_test, colour)
    apart = colour != digit
    for name, answer in [("shape 1", digit), ("shape 2", digit), ("colour 1", colour)]:
        with torch.no_grad():
            said = nets[name](torn).argmax(1)
        assert float((said == answer)[apart].double().mean()) > 0.85
    assert not any(p.requires_grad for p in nets["both"].parameters())
    assert not nets["both"].training


@pytest.mark.parametrize("short", [False, True])
def test_networks_of_the_study_train_as_long_as_the_page_says(monkeypatch, short):
    seen = []

    def train(mode, seed, epochs=None, *, split):
        seen.append((mode, seed, st.EPOCHS[mode] if epochs is None else epochs, split))

    monkeypatch.setattr(st, "train_cue_model", train)
    assert list(st.cue_models.__wrapped__(7, short)) == [*st.MODELS, "untrained"]
    passes = dict(
        zip(("shape", "colour", "both"), (25, 12, 12) if short else (40, 20, 40), strict=True)
    )
    modes = [name.split()[0] for name in st.MODELS]
    assert [(mode, epochs) for mode, _, epochs, _ in seen[:-1]] == [(m, passes[m]) for m in modes]
    assert seen[-1][2] == 0
    assert len({seed for _, seed, _, _ in seen}) == 6
    assert {split for *_, split in seen} == {7}


def test_cue_rows_draw_the_nuisance_anew_each_pass():
    rows_of = st.cue_rows("shape", 0)
    generator = g(2)
    first, second = rows_of(generator), rows_of(generator)
    assert torch.equal(first.y, second.y)
    assert not torch.equal(first.x, second.x)
    both = st.cue_rows("both", 0)
    assert torch.equal(both(generator).x, both(generator).x)


def test_clustered_noise_has_the_means_and_the_spread_that_it_was_given():
    y = torch.arange(10).repeat_interleave(400)
    z = st.clustered_noise(y, 6, g(1))
    assert z.shape == (4000, 6)
    assert z.dtype == F64
    by_class = z.reshape(10, 400, 6)
    assert float((by_class.std(dim=1) - 0.3).abs().max()) < 0.05
    again = st.clustered_noise(y, 6, g(2), means=by_class.mean(dim=1))
    assert float((again.reshape(10, 400, 6).mean(1) - by_class.mean(1)).abs().max()) < 0.08
    for bad, message in [
        ({"y": y.double()}, "y must hold whole numbers"),
        ({"y": y[:0]}, "y must hold whole numbers"),
        ({"width": 0}, "width must be a whole number"),
        ({"spread": -1.0}, "spread finite"),
        ({"means": torch.zeros(9, 6)}, r"means must be \(10 or more, 6\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            st.clustered_noise(**{"y": y, "width": 6, **bad})


def test_journeys_start_at_x0_and_end_where_the_inversion_ends(world):
    nets, data = world
    models = {name: nets[name].split() for name in ("shape 1", "colour 1")}
    found = st.journeys(models, data, n=3, steps=40, every=20)
    assert set(found) == {(a, b) for a in models for b in models}
    trip = found["colour 1", "shape 1"]
    assert trip.path.shape == (3, 3, 192)
    assert torch.equal(trip.path[0], data.x0[:3])
    A, B = models["colour 1"], models["shape 1"]
    T = st.fit_stitch(A, B, data.x_stitch, data.y_stitch, "slm")
    with torch.no_grad():
        variance = st.target_variance(B.front(data.x_test))
        end = st.invert(
            B.front, T(A.front(data.x_test[:3])), data.x0[:3], steps=40, variance=variance
        )
        assert torch.allclose(trip.path[-1], end.x, atol=1e-9)
        assert torch.equal(trip.sender[-1], A(end.x).argmax(1))
        assert torch.equal(trip.receiver[-1], B(end.x).argmax(1))
        assert torch.equal(trip.sender_x, A(data.x_test[:3]).argmax(1))


def test_runs_are_unique_and_an_unknown_one_is_refused():
    assert len(set(st.RUNS)) == len(st.RUNS) == 3 * (20 + 3 + 10)
    with pytest.raises(ValueError, match="run must be one of RUNS"):
        st.study_run("shape 1 > shape 3 | seed=0")
    with pytest.raises(ValueError, match="case must be one of"):
        st.linear_draw("same", 0)
    for epochs in (-1, 2.5, True):
        with pytest.raises(ValueError, match="epochs must be a whole number"):
            st.train_cue_model("shape", 0, epochs)


def test_pair_study_measures_what_was_asked_and_leaves_out_what_has_no_scale(world):
    kwargs = {"seed": 0, "short": True, "n_test": 150, "steps": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise = st.pair_study(sender="noise", receiver="shape 2", backward=("slm",), **kwargs)
    assert {"slm_accuracy", "slm_fc", "cka"} <= set(noise)
    assert not any(k.endswith(("_bc", "_ias")) for k in noise)
    assert noise["slm_accuracy"] > 0.9  # stitch and test rows stand around the same means
    found = st.pair_study(
        sender="shape 1", receiver="shape 2", backward=("slm",), forward=("task",), **kwargs
    )
    assert {"task_accuracy", "slm_bc", "slm_reach", "shared_invariance", "ceiling"} <= set(found)
    assert "task_bc" not in found
