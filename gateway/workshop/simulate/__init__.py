"""The simulator: a model of llama.cpp nodes, and how each policy serves traffic on a fleet.

`fleets` says which machines there are. `simulation` reads requests or makes them up, models the
machines, and plays the requests through a front (`fronts`: the gateway's own dispatcher, or another
proxy). `comparison` does that for several policies, and `report` sums each up, beside a bound
(`lower_bound`) that no schedule could beat.
"""
