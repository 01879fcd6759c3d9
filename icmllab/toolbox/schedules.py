"""Learning-rate schedules as plain functions of the step: a factor of the peak rate.

They fit ``torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: wsd_schedule(t, total, warmup))``
as well as a loop that multiplies by hand.
"""

import math


def wsd_schedule(step: int, total: int, warmup: int, decay_frac: float = 0.2) -> float:
    """Warm-up, stable, decay: linear rise, plateau at 1, linear fall to 0.

    Args:
        step: the step that is about to be taken, from 0; steps beyond ``total`` get 0.
        total: number of steps of the run.
        warmup: number of rising steps; step ``warmup - 1`` is the first at the peak.
        decay_frac: share of the run that falls. The first step of the fall is at the peak and
            step ``total``, which is never taken, would be at 0: every step moves.

    Returns:
        The factor, in [0, 1].

    Raises:
        ValueError: a negative step, or a warm-up and a fall that do not fit the run.
    """
    _check(step, total, warmup)
    if not 0 <= decay_frac <= 1:
        raise ValueError(f"decay_frac must be in [0, 1]: got {decay_frac}")
    decay = round(decay_frac * total)
    if warmup + decay > total:
        raise ValueError(
            f"warmup and the decay must fit total: got warmup={warmup}, decay={decay}, "
            f"total={total}"
        )
    if step >= total:
        return 0.0
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (total - step) / decay) if decay else 1.0


def cosine_schedule(step: int, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Linear warm-up, then half a cosine from 1 down to ``floor``.

    Args:
        step: the step that is about to be taken, from 0; steps beyond ``total`` get ``floor``.
        total: number of steps of the run.
        warmup: number of rising steps; step ``warmup - 1`` is the first at the peak.
        floor: the factor at the end, in [0, 1].

    Returns:
        The factor, in [0, 1].

    Raises:
        ValueError: a negative step, a warm-up longer than the run, or a bad floor.
    """
    _check(step, total, warmup)
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be in [0, 1]: got {floor}")
    if step < warmup:
        return (step + 1) / warmup
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def _check(step: int, total: int, warmup: int) -> None:
    if step < 0:
        raise ValueError(f"step must be >= 0: got {step}")
    if total < 1:
        raise ValueError(f"total must be >= 1: got {total}")
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup must be in [0, total={total}]: got {warmup}")
