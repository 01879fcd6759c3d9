"""Quantisers, caches, coders and drafts, beside what people would use instead."""

import math
import warnings

import numpy as np
import torch
from race import Row, race


def watersic_beside_gptq() -> Row:
    """The loop with WaterSIC's steps against textbook GPTQ, at the same measured entropy."""
    from icmllab.efficiency import watersic as ws

    sigma, W = ws.covariance("power", 256), ws.gaussian_weights(2048, 256, 0)
    lam = torch.linalg.eigvalsh(sigma)
    q = ws.watersic_quantize(W, sigma, rate=3.0, rescale=False)

    def spent(step: float) -> float:
        return ws.code_entropy(ws.gptq_obs(W, sigma, step).codes)

    step = float(ws.gptq_quantize(W, sigma, rate=3.0, rescale=False, lmmse=False).alpha[0])
    step *= 2 ** (spent(step) - q.rate(overhead=False))
    coded = ws.gptq_obs(W, sigma, step)
    left = W - coded.weights
    D = float(((left @ sigma) * left).sum() / W.numel())
    gaps = [
        rate - ws.waterfilling(lam, distortion=error).rate
        for rate, error in (
            (q.rate(overhead=False), q.distortion(W, sigma)),
            (ws.code_entropy(coded.codes), D),
        )
    ]
    alpha = q.alpha
    times = race(
        lambda: ws.sic(W, sigma, alpha, lmmse=False),
        lambda: ws.gptq_obs(W, sigma, step),
        rounds=3,
    )
    told = f"bits above the limit {gaps[0]:.2f}, {gaps[1]:.2f}"
    return Row("WaterSIC's loop, 2048 × 256, 3 bits", "GPTQ, inverse-Hessian form", *times, told)


def clustering() -> list[Row]:
    """k-means and gain-shape k-means against scikit-learn's, at equal rounds."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    from icmllab.efficiency import gsrq
    from icmllab.toolbox.clustering import kmeans

    warnings.simplefilter("ignore", ConvergenceWarning)
    train, test = gsrq.split("A", 0)
    start = train[:256]

    def theirs():
        return KMeans(256, init=start.numpy(), n_init=1, max_iter=15, tol=0).fit(train.numpy())

    def ours():
        return kmeans(train, 256, init=start, max_iter=15, empty="farthest")

    told = f"distortion {float(ours().inertia) / theirs().inertia_:.3f} of theirs"
    times = race(ours, theirs)
    rows = [Row("k-means, 6000 × 64, K=256, 15 rounds", "scikit-learn KMeans", *times, told)]

    def shape():
        return gsrq.GainShapeKMeans(256, max_iter=15, tol=0, random_state=0).fit(train)

    plain, found = theirs(), shape()
    centres = torch.from_numpy(plain.cluster_centers_)
    cosines = [
        float(torch.cosine_similarity(test, words[labels]).mean())
        for words, labels in (
            (found.cluster_centers_, gsrq.gskm_assign(test, found.shapes_)),
            (centres, torch.from_numpy(plain.predict(test.numpy())).long()),
        )
    ]
    told = f"cosine on unseen rows {cosines[0]:.3f}, {cosines[1]:.3f}"
    rows.append(
        Row("gain-shape k-means, the same", "scikit-learn KMeans", *race(shape, theirs), told)
    )
    return rows


def cache_attention() -> Row:
    """A decoding step without decoding the cache against decoding it first."""
    from icmllab.efficiency import patternkv as pk

    data = pk.structured(0)
    cache, full = pk.PatternKVCache(1, 128), pk.FullKVCache(1, 128)
    kivi = pk.KIVICache(1, 128)
    for c in (cache, full, kivi):
        c.prefill(data.k[None, None], data.v[None, None])
    q = data.q[:1][None, None]

    def decode_first():
        w = torch.softmax(q @ cache.keys().mT / math.sqrt(128), dim=-1)
        return w @ cache.values()

    gap = float((cache.attend(q) - decode_first()).abs().max())
    less = [full.nbytes / c.nbytes for c in (cache, kivi)]
    told = f"differs by {gap:.0e}; {less[0]:.1f} × fewer bytes than float16, KIVI {less[1]:.1f}"
    times = race(lambda: cache.attend(q), decode_first)
    return Row("PatternKV attention, 2048 tokens", "decode, then attend", *times, told)


def huffman() -> Row:
    """The vectorised Huffman coder against one symbol after the other."""
    from icmllab.toolbox.information import HuffmanCode, code_entropy

    rng = np.random.default_rng(0)
    codes = torch.from_numpy(np.round(3 * rng.normal(size=20_000)).astype(np.int64))
    code = HuffmanCode.of(codes)
    words = {
        int(s): format(int(w), f"0{int(n)}b")
        for s, w, n in zip(code.symbols, code.words, code.lengths, strict=True)
    }

    def plain():
        bits = "".join(words[c] for c in codes.tolist())
        bits += "0" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big")

    assert plain() == code.encode(codes)
    entropy = code_entropy(codes[:, None], miller_madow=False)
    told = f"{code.n_bits(codes) / len(codes):.3f} bits a symbol, entropy {entropy:.3f}"
    times = race(lambda: code.encode(codes), plain)
    return Row("Huffman encoding, 20 000 symbols", "one symbol after the other", *times, told)


def drafting() -> list[Row]:
    """Verified tokens an emitted one: not a time, but what a loaded server pays."""
    from icmllab.efficiency import echo

    rows = []
    ours = echo.compare_run("echo", 16, 48, 0)
    for other in ("chain", "static", "dynamic"):
        theirs = echo.compare_run(other, 16, 48, 0)
        cost = [(16 + r["nodes"]) / (16 * r["tokens"]) for r in (ours, theirs)]
        told = f"tokens a step {ours['tokens']:.2f}, {theirs['tokens']:.2f}"
        rows.append(Row("ECHO, verified an emitted token, 16 + 48", f"{other} draft", *cost, told))
    return rows


COMPARISONS = (watersic_beside_gptq, clustering, cache_attention, huffman, drafting)
