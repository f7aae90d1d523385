"""The pure core of scheduling, which the simulator runs too: plain numbers, time passed in."""
