"""The GradPower chapter's exercises: its solutions pass their checkers, plausible slips do not."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from icmllab.training import gradpower as gp

PAGE = Path(__file__).resolve().parents[2] / "book" / "training" / "gradpower.md"

EXERCISES = {
    "gradpower-safe": ("sign_power", gp.check_sign_power),
    "gradpower-wrap": ("power_step", gp.check_power_step),
    "gradpower-triangle": ("triangular_gain", gp.check_triangular_gain),
    "gradpower-stein": ("xi_phi", gp.check_stein),
    "gradpower-estimate": ("estimate", gp.check_best_power),
}


def solution(label: str) -> str:
    """The code of the solution of exercise ``label``, as it stands in the chapter."""
    text = PAGE.read_text(encoding="utf-8")
    body = re.search(rf"^```\{{solution\}} {label}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code = re.search(r"^~~~python\n(.*?)^~~~", body.group(1), re.DOTALL | re.MULTILINE)
    return code.group(1)


@pytest.mark.parametrize("label", EXERCISES)
def test_solution_passes_its_checker(label):
    name, check = EXERCISES[label]
    namespace = {}
    exec(solution(label), namespace)
    assert check(namespace[name]) is None


def test_every_exercise_of_the_chapter_has_a_checker():
    labels = re.findall(r":label: (gradpower-\S+)", PAGE.read_text(encoding="utf-8"))
    assert sorted(labels) == sorted(EXERCISES)


def by_logarithm(g, p):
    return g.sign() * torch.exp(p * g.log())


def by_log_of_size(g, p):
    return g.sign() * torch.exp(p * (g.abs() + 1e-8).log())


def without_sign(g, p):
    return g.abs() ** p


def power_in_place(g, p):
    return g.copy_(g.sign() * g.abs() ** p)


def power_first_group(optimizer, p):
    for weight in optimizer.param_groups[0]["params"]:
        if weight.grad is not None:
            weight.grad = gp.sign_power(weight.grad, p)
    optimizer.step()


def power_without_none(optimizer, p):
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = weight.grad.sign() * weight.grad.abs() ** p
    optimizer.step()


def power_the_weight(optimizer, p):
    optimizer.step()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.data = gp.sign_power(weight.data, p)


def triangle_without_slope(p):
    return ((2 * (2 * p + 1)) / (3 * (p + 1))) ** 0.5 / p


def triangle_as_uniform(p):
    return gp.gain_factor(p, "uniform")


def moment_of_p(p):
    return gp.gain_factor(p, "gaussian")


def root_mean_square(p):
    return float(torch.exp(0.5 * torch.lgamma(torch.tensor(p + 0.5))) * 2 ** (p / 2) / np.pi**0.25)


def pooled_without_scaling(grads):
    xi = (grads - grads.mean()) / grads.std()
    powers = np.arange(0.3, 3.0, 0.1)
    return powers[np.argmax([gp.gain_factor(p, xi) for p in powers])]


def always_adam(grads):
    return 1.0


@pytest.mark.parametrize(
    ("check", "slip", "hint"),
    [
        (gp.check_sign_power, by_logarithm, "NaN"),
        (gp.check_sign_power, by_log_of_size, "expected"),
        (gp.check_sign_power, without_sign, "expected sign"),
        (gp.check_sign_power, power_in_place, "make a new tensor"),
        (gp.check_power_step, power_first_group, "every group"),
        (gp.check_power_step, power_without_none, "skipped"),
        (gp.check_power_step, power_the_weight, "expected the base"),
        (gp.check_triangular_gain, triangle_without_slope, "quadrature"),
        (gp.check_triangular_gain, triangle_as_uniform, "quadrature"),
        (gp.check_stein, moment_of_p, "Stein"),
        (gp.check_stein, root_mean_square, "Stein"),
        (gp.check_best_power, pooled_without_scaling, "each coordinate"),
        (gp.check_best_power, always_adam, "best power"),
    ],
)
def test_plausible_slips_are_caught_with_a_hint(check, slip, hint):
    with pytest.raises(AssertionError, match=hint):
        check(slip)
