"""What every quantity should be, in NumPy float64 with loops, and in 120 digits where rounding decides the answer.

One row at a time, visible keys only; written from the definitions and without attnmon.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np

mpmath.mp.dps = 120


def top(weights: np.ndarray, size: int) -> list[int]:
    """Indices of the `size` largest weights, ties to the lower index."""
    return sorted(range(len(weights)), key=lambda j: (-float(weights[j]), j))[:size]


def softmax(scores: np.ndarray, temperature: float) -> list[mpmath.mpf]:
    exps = [
        mpmath.exp((mpmath.mpf(float(s)) - mpmath.mpf(float(max(scores)))) / mpmath.mpf(temperature)) for s in scores
    ]
    total = mpmath.fsum(exps)
    return [e / total for e in exps]


def entropy(weights: np.ndarray) -> float:
    return -math.fsum(float(a) * math.log(float(a)) for a in weights if a > 0) + 0.0


def participation(weights: np.ndarray) -> float:
    return 1 / math.fsum(float(a) ** 2 for a in weights)


def spread(scores: np.ndarray) -> float:
    mean = math.fsum(map(float, scores)) / len(scores)
    return math.sqrt(math.fsum((float(s) - mean) ** 2 for s in scores) / len(scores))


def _products(weights: np.ndarray, vectors: np.ndarray) -> list[list[mpmath.mpf]]:
    return [[mpmath.mpf(float(a)) * mpmath.mpf(float(v)) for v in x] for a, x in zip(weights, vectors, strict=True)]


def _sum(rows: list[list[mpmath.mpf]], d: int) -> list[mpmath.mpf]:
    return [mpmath.fsum(row[c] for row in rows) for c in range(d)]


def _norm(row: list[mpmath.mpf]) -> mpmath.mpf:
    return mpmath.sqrt(mpmath.fsum(v * v for v in row))


def distances(weights: np.ndarray, vectors: np.ndarray, size: int) -> dict[str, float]:
    """Every field of a top-N distance."""
    n, d = vectors.shape
    chosen = top(weights, size)
    rest = [j for j in range(n) if j not in chosen]
    y = _products(weights, vectors)
    x = [[mpmath.mpf(float(v)) for v in row] for row in vectors]
    a = [mpmath.mpf(float(w)) for w in weights]
    s = _sum([y[i] for i in chosen], d)
    c = _sum(y, d)
    distance = mpmath.fsum(_norm([p - q for p, q in zip(y[i], s, strict=True)]) for i in rest)
    total = mpmath.fsum(a[i] for i in chosen)
    gap = max(_norm([p - q for p, q in zip(x[i], x[j], strict=True)]) for i in rest for j in chosen)
    longest = max(_norm(x[j]) for j in chosen)
    k = mpmath.mpf(size) / (n - 1)
    share = mpmath.mpf(n - size) / n
    printed = share * mpmath.fsum(_norm([(a[i] + k) * x[i][t] - c[t] for t in range(d)]) for i in range(n))
    lower, upper = mpmath.mpf(0), mpmath.mpf(0)
    norms = [mpmath.fsum(v * v for v in row) for row in y]
    for i in range(n):
        square = mpmath.fsum((y[i][t] - k * (c[t] - y[i][t])) ** 2 for t in range(d))
        mean = [(c[t] - y[i][t]) / (n - 1) for t in range(d)]
        spread_of = (mpmath.fsum(norms) - norms[i]) / (n - 1) - mpmath.fsum(v * v for v in mean)
        variance = size * (n - 1 - size) * spread_of / (n - 2) if size < n - 1 else mpmath.mpf(0)
        lower += mpmath.sqrt(square)
        upper += mpmath.sqrt(square + variance)
    return {
        "distance": float(distance),
        "upper_bound": float((1 - total) * gap + longest * (total * (n - size) - (1 - total))),
        "expected_paper": float(printed),
        "expected_lower": float(share * lower),
        "expected_upper": float(share * upper),
    }


def separability(weights: np.ndarray, vectors: np.ndarray, size: int) -> dict[str, float]:
    """Every field of the separability of a row."""
    n, d = vectors.shape
    chosen = top(weights, size)
    rest = [j for j in range(n) if j not in chosen]
    y = _products(weights, vectors)
    s = _sum([y[i] for i in chosen], d)
    squares = [mpmath.fsum((y[i][t] - s[t]) ** 2 for t in range(d)) for i in range(n)]
    least, most = min(squares[j] for j in rest), max(squares[i] for i in chosen)
    ratio = sum(squares[i] < least for i in chosen) / size
    precision = size / (size + sum(squares[j] <= most for j in rest))
    return {
        "ratio": ratio,
        "radius": float(mpmath.sqrt(least)),
        "precision": precision,
        "f_score": 2 * ratio * precision / (ratio + precision),
    }


def bounds(weights: np.ndarray, vectors: np.ndarray, size: int) -> dict[str, float]:
    """Both sides of Theorem 2."""
    n = len(weights)
    x = vectors.astype(np.float64)
    chosen = top(weights, size)
    radius = separability(weights, vectors, size)["radius"]
    m = max(np.linalg.norm(x[j]) for j in range(n))
    delta = min(np.linalg.norm(x[i] - x[j]) for i in range(n) for j in range(i))
    xi = []
    for i in chosen:
        others = [float(weights[j]) for j in chosen if j != i]
        linear, square = math.fsum(others), math.fsum(a * a for a in others)
        xi.append(math.sqrt(max((m * m - delta**2 / 2) * linear**2 + delta**2 / 2 * square, 0)))
    terms = [math.exp(-((radius - v) ** 2) / (16 * m * m)) if m else 1.0 for v in xi]
    return {
        "lower": 1 - math.fsum(xi) / (radius * size) if radius > 0 else -math.inf,
        "upper": math.fsum(terms) / size,
        "upper_valid": math.fsum(t if radius < v else 1.0 for t, v in zip(terms, xi, strict=True)) / size,
    }


def jacobian(scores: np.ndarray, temperature: float) -> dict[str, float]:
    """Three norms of the softmax Jacobian; the spectral one by bisection on the secular equation."""
    a = sorted(softmax(scores, temperature), reverse=True)
    t = mpmath.mpf(temperature)
    n = len(a)
    if n == 1:
        return {"spectral": 0.0, "frobenius": 0.0, "max": 0.0}
    others = [mpmath.fsum(a[:i] + a[i + 1 :]) for i in range(n)]
    squares = [mpmath.fsum(w * w for w in a[:i] + a[i + 1 :]) for i in range(n)]
    frobenius = mpmath.sqrt(mpmath.fsum(a[i] ** 2 * (others[i] ** 2 + squares[i]) for i in range(n)))
    if a[0] == a[1]:
        spectral = a[0]
    else:
        # 1 - a^T (diag(a) - x)^-1 a changes sign between the two largest weights
        low, high = a[1], a[0]
        for _ in range(400):
            middle = (low + high) / 2
            value = 1 - mpmath.fsum(w * w / (w - middle) for w in a)
            low, high = (middle, high) if value > 0 else (low, middle)
        spectral = low
    return {
        "spectral": float(spectral / t),
        "frobenius": float(frobenius / t),
        "max": float(max(w * o for w, o in zip(a, others, strict=True)) / t),
    }


def sensitivity(scores: np.ndarray, direction: np.ndarray, temperature: float, epsilon: float) -> float:
    """Length of the change of the weights under a nudge of `epsilon` along a unit vector, over `epsilon`."""
    t, e = mpmath.mpf(temperature), mpmath.mpf(epsilon)
    length = _norm([mpmath.mpf(float(v)) for v in direction])

    def weights(step: mpmath.mpf) -> list[mpmath.mpf]:
        z = [
            (mpmath.mpf(float(s)) + step * mpmath.mpf(float(v)) / length) / t
            for s, v in zip(scores, direction, strict=True)
        ]
        exps = [mpmath.exp(v - max(z)) for v in z]
        total = mpmath.fsum(exps)
        return [v / total for v in exps]

    return float(_norm([p - q for p, q in zip(weights(e), weights(mpmath.mpf(0)), strict=True)]) / e)
