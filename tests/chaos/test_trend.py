from __future__ import annotations

import random

from tests.chaos.trend import trend


def test_growth_is_distinguished_from_noise() -> None:
    rng = random.Random(1)
    noise = [(float(t), 100 + rng.uniform(-1, 1)) for t in range(600)]
    assert trend(noise).is_flat(share=0.02, least=0.5)
    growing = [(t, value + t / 50) for t, value in noise]
    assert not trend(growing).is_flat(share=0.02, least=0.5)
    warming = [(t, value - max(0.0, 100 - t)) for t, value in noise]
    assert trend(warming).is_flat(share=0.02, least=0.5)
    spiked = [(t, 1000.0 if t == 590 else value) for t, value in noise]
    assert trend(spiked).is_flat(share=0.02, least=0.5)
