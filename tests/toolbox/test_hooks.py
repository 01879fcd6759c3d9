"""Activations by hooks, and networks cut in two."""

import pytest
import torch
from torch import nn

from icmllab.toolbox.hooks import RANGES, SplitModel, collect, evaluating, split_at


def net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collect_gives_what_a_forward_by_hand_gives(dtype):
    model, x = net(dtype), torch.randn(11, 5, dtype=dtype)
    seen = collect(model, ["3", "0", ""], x)
    assert list(seen) == ["3", "0", ""]
    with torch.no_grad():
        assert torch.equal(seen["0"], model[0](x))
        assert torch.equal(seen["3"], model[:4](x))
        assert torch.equal(seen[""], model(x))
    for batch_size in (1, 4, 11, 50):
        parts = collect(model, ["3"], x, batch_size=batch_size)
        assert torch.allclose(parts["3"], seen["3"], rtol=1e-6)


def test_collect_leaves_no_hook_no_gradient_and_the_modes_as_they_were():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = collect(model, ["2"], torch.randn(9, 5))
    assert not seen["2"].requires_grad
    assert [m.training for m in model] == [True, False, True]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model)
    assert float((seen["2"] == 0).double().mean()) < 0.1  # dropout was off


def test_collect_keeps_what_was_put_out_before_an_in_place_activation():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    assert float(collect(model, ["0"], x)["0"].min()) < 0


def test_collect_cleans_up_when_the_network_raises():
    model = net()
    with pytest.raises(RuntimeError):
        collect(model, ["0"], torch.randn(2, 4, dtype=torch.float64))
    assert not model[0]._forward_hooks
    assert model.training


def test_bad_names_rows_and_batches_are_named():
    model, x = net(), torch.randn(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"names must be submodules.*'9'"):
        collect(model, ["9"], x)
    with pytest.raises(ValueError, match="names must differ"):
        collect(model, ["0", "0"], x)
    with pytest.raises(ValueError, match="x must hold at least one row"):
        collect(model, ["0"], x[:0])
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        collect(model, ["0"], x, batch_size=0)


def test_submodules_that_run_twice_or_put_out_no_tensor_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.pair = nn.Identity(), Pair()

        def forward(self, x):
            return self.twice(self.twice(x)) + self.pair(x)[0]

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    model, x = Odd(), torch.ones(2, 3)
    with pytest.raises(ValueError, match="'twice' ran 2 times for 1"):
        collect(model, ["twice"], x)
    with pytest.raises(ValueError, match="'pair' gave tuple"):
        collect(model, ["pair"], x)
    assert not model.pair._forward_hooks


def test_evaluating_restores_each_submodules_own_mode_also_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1][0].eval()
    seen = []

    def fail():
        with evaluating(model):
            seen.extend(m.training for m in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any(seen)
    assert [m.training for m in model.modules()] == [True, True, True, False, True]


def test_the_two_halves_make_the_whole_and_share_its_parameters():
    model, x = net(), torch.randn(4, 5, dtype=torch.float64)
    for index in range(1, len(model)):
        front, head = split_at(model, index)
        assert torch.equal(head(front(x)), model(x))
        assert {id(p) for p in (*front.parameters(), *head.parameters())} == {
            id(p) for p in model.parameters()
        }
    for index in (0, 5, -1, 1.5, True):
        with pytest.raises(ValueError, match="index must leave submodules on both sides, 1 to 4"):
            split_at(model, index)
    with pytest.raises(ValueError, match=r"nn\.Sequential: got Linear"):
        split_at(nn.Linear(2, 2), 1)


def test_split_model_traces_its_layers_and_knows_the_fronts_range():
    model, x = net(), torch.randn(4, 5, dtype=torch.float64)
    split = SplitModel(*split_at(model, 2), layers=(1, 2))
    assert torch.equal(split(x), model(x))
    z = split.front(x)
    trace = split.trace(z)
    assert [t.shape for t in trace] == [(4, 7), (4, 6), (4, 3)]
    assert torch.equal(trace[1], model[:4](x))
    assert torch.equal(trace[2], model(x))
    assert torch.equal(split.into_range(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert SplitModel(*split_at(model, 1)).into_range is None
    assert SplitModel(*split_at(model, 2)).layers == (2,)


@pytest.mark.parametrize("activation", list(RANGES))
def test_what_an_activation_puts_out_is_left_as_it_is_by_its_range(activation):
    z = activation()(torch.linspace(-6, 6, 101, dtype=torch.float64))
    assert torch.equal(RANGES[activation](z), z)


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1,), (3,)])
def test_layers_that_the_head_has_not_are_refused(layers):
    front, head = split_at(net(), 2)
    with pytest.raises(ValueError, match="layers must be rising indices of the 3 submodules"):
        SplitModel(front, head, layers)


def test_a_head_must_be_a_sequential_with_submodules():
    for head in (nn.Linear(2, 2), nn.Sequential()):
        with pytest.raises(ValueError, match=r"head must be an nn\.Sequential"):
            SplitModel(nn.Identity(), head)
