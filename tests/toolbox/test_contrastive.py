"""Contrastive losses against closed forms and plain loops."""

import math

import pytest
import torch

from icmllab.toolbox.contrastive import info_nce


def _views(seed, batch=6, dim=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(2)]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_info_nce_is_the_mean_of_both_directions_of_a_plain_loop(dtype, tol):
    za, zb = _views(0, dtype=dtype)
    total = 0.0
    for x, y in ((za.double(), zb.double()), (zb.double(), za.double())):
        for i in range(len(x)):
            cosines = [float(x[i] @ row / x[i].norm() / row.norm()) / 0.3 for row in y]
            total += math.log(sum(math.exp(c) for c in cosines)) - cosines[i]
    assert float(info_nce(za, zb, temperature=0.3)) == pytest.approx(total / 12, abs=tol)


def test_info_nce_of_equal_rows_is_the_logarithm_of_the_batch():
    z = torch.ones(9, 3, dtype=torch.float64)
    assert float(info_nce(z, 5 * z, temperature=0.07)) == pytest.approx(math.log(9))


def test_info_nce_ignores_the_length_of_rows_and_a_common_rotation():
    za, zb = _views(1)
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    lengths = torch.rand(6, 1, dtype=torch.float64) + 0.5
    assert float(info_nce(za, zb)) == pytest.approx(
        float(info_nce(za @ rotation * lengths, zb @ rotation))
    )


def test_info_nce_of_orthogonal_pairs_has_its_closed_form():
    z = torch.eye(5, dtype=torch.float64)
    assert float(info_nce(z, z, temperature=1.0)) == pytest.approx(math.log(1 + 4 * math.exp(-1)))


def test_info_nce_passes_the_gradient_check():
    za, zb = (z.requires_grad_() for z in _views(2))
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, temperature=0.5), (za, zb))


@pytest.mark.parametrize(
    ("za", "zb", "temperature", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 5), 0.1, "one shape"),
        (torch.zeros(1, 4), torch.zeros(1, 4), 0.1, "batch >= 2"),
        (torch.zeros(3, 4), torch.zeros(3, 4), 0.0, "temperature"),
        (torch.zeros(3, 4), torch.zeros(3, 4), float("nan"), "temperature"),
    ],
)
def test_bad_input_is_named(za, zb, temperature, message):
    with pytest.raises(ValueError, match=message):
        info_nce(za, zb, temperature=temperature)
