"""The world-geometry chapter's exercises: its solutions pass their checkers, slips do not."""

import pytest
import torch
from exercise_helpers import Exercises

from icmllab.representations import world_geometry as wg
from icmllab.toolbox.similarity import cka_linear, cka_unbiased

EXERCISES = Exercises("representations/world_geometry", "wg", wg)


def test_every_exercise_has_a_solution_with_code():
    EXERCISES.check_complete(5)


@pytest.mark.parametrize("label", EXERCISES.labels)
def test_solution_passes_its_checker(label):
    EXERCISES.run(label)


def turn(a, b, c):
    u, v = b - a, c - a
    return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]


def inside_of_left_turns_only(point, hull):
    a, b, c = hull.unbind(dim=1)
    return torch.stack([turn(a, b, point), turn(b, c, point), turn(c, a, point)]).ge(0).all(dim=0)


def inside_the_box(point, hull):
    return ((point >= hull.amin(dim=1)) & (point <= hull.amax(dim=1))).all(dim=1)


def inside_without_the_rim(point, hull):
    a, b, c = hull.unbind(dim=1)
    turns = torch.stack([turn(a, b, point), turn(b, c, point), turn(c, a, point)])
    return (turns > 0).all(dim=0) | (turns < 0).all(dim=0)


def lines_cross(a, b, c, d):
    return turn(a, b, c) * turn(a, b, d) < 0


def touching_counts(a, b, c, d):
    return (turn(a, b, c) * turn(a, b, d) <= 0) & (turn(c, d, a) * turn(c, d, b) <= 0)


def reduce_the_angle(degrees):
    return (((degrees + 22.5) % 360) / 45).long()


def without_the_half_sector(degrees):
    return torch.floor(degrees / 45).long() % 8


def border_to_the_lower_sector(degrees):
    return (torch.ceil((degrees - 22.5) / 45).long()) % 8


def ridge(H, Y, H_new, alpha, *, correction=0, shrink=False, peek=False):
    centre, scale = H.mean(dim=0), H.std(dim=0, correction=correction)
    X, X_new = (H - centre) / scale, (H_new - centre) / scale
    if peek:
        X_new = (H_new - H_new.mean(dim=0)) / H_new.std(dim=0, correction=0)
    mean = 0 if shrink else Y.mean(dim=0)
    eye = torch.eye(X.shape[1], dtype=X.dtype)
    return X_new @ torch.linalg.solve(X.T @ X + alpha * eye, X.T @ (Y - mean)) + mean


def matched(maps_a, maps_b, alone, *, cka=cka_unbiased, first=False):
    pairs = [(q, r) for q in maps_a for r in maps_b][: 1 if first else None]
    multi = sum(cka(maps_a[q], maps_b[r]) for q, r in pairs) / len(pairs)
    single = sum(cka(alone[q], alone[r]) for q, r in pairs) / len(pairs)
    joined = cka(torch.cat(list(maps_a.values()), 1), torch.cat(list(maps_b.values()), 1))
    side = [torch.cat([alone[q] for q in maps], 1) for maps in (maps_a, maps_b)]
    return multi - single, joined - cka(*side)


def untouched(model, new, draw):
    return model


def all_weights(model, new, draw):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(120):
        tokens, labels = draw("distance", 96, True)
        loss = torch.nn.functional.cross_entropy(model(tokens, "distance"), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def peek_at_compass(model, new, draw):
    draw("compass", 8, True)
    return model


@pytest.mark.parametrize(
    ("check", "slip", "hint"),
    [
        (wg.check_inside, inside_of_left_turns_only, "one sign"),
        (wg.check_inside, inside_the_box, "outside the triangle"),
        (wg.check_inside, inside_without_the_rim, "corner"),
        (wg.check_crossing, lines_cross, "Each segment"),
        (wg.check_crossing, touching_counts, "share an end"),
        (wg.check_compass, reduce_the_angle, "hair below"),
        (wg.check_compass, without_the_half_sector, "sector"),
        (wg.check_compass, border_to_the_lower_sector, "on a border"),
        (wg.check_ridge, lambda *a: ridge(*a, correction=1), "scikit-learn differs"),
        (wg.check_ridge, lambda *a: ridge(*a, shrink=True), "scikit-learn differs"),
        (wg.check_ridge, lambda *a: ridge(*a, peek=True), "training rows"),
        (wg.check_matched, lambda *a: matched(*a, cka=cka_linear), "gain is"),
        (wg.check_matched, lambda *a: matched(*a, first=True), "all pairs"),
        (wg.check_matched, lambda *a: (matched(*a)[0], matched(*a)[0]), "excess"),
        (wg.check_remedy, untouched, "distance is right"),
        (wg.check_remedy, all_weights, "expected"),
        (wg.check_remedy, peek_at_compass, "not given"),
        (wg.check_remedy, lambda model, new, draw: None, "model back"),
    ],
)
def test_plausible_slips_are_caught_with_a_hint(check, slip, hint):
    with pytest.raises(AssertionError, match=hint):
        check(slip)
