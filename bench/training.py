"""Optimizers beside torch's."""

import torch
from race import Row, race


def optimizer_step() -> list[Row]:
    """A step of AdamWPower against torch's AdamW, without and with an eager power before it."""
    from icmllab.training.gradpower import AdamWPower, sign_power_

    def parameters():
        g = torch.Generator().manual_seed(0)
        made = [torch.nn.Parameter(torch.randn(256, 512, generator=g)) for _ in range(16)]
        for p in made:
            p.grad = torch.randn(p.shape, generator=g)
        return made

    rows = []
    for power in (1.0, 1.2):
        mine, others = parameters(), parameters()
        kept = [p.grad.clone() for p in others]
        ours = AdamWPower(mine, lr=1e-3, p=power)
        theirs = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

        def step_theirs(others=others, kept=kept, theirs=theirs, power=power):
            if power != 1.0:  # the power works in place: give it fresh gradients
                for p, grad in zip(others, kept, strict=True):
                    p.grad.copy_(grad)
                sign_power_(others, power)
            theirs.step()

        times = race(ours.step, step_theirs)
        gap = max((a - b).abs().max().item() for a, b in zip(mine, others, strict=True))
        name = "AdamW (foreach)" if power == 1.0 else "eager power, then AdamW"
        rows.append(
            Row(f"AdamWPower step, p={power}, 2 M", name, *times, f"parameters differ by {gap:.0e}")
        )
    return rows


COMPARISONS = (optimizer_step,)
