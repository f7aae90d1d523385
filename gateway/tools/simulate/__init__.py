"""The simulator: a model of llama.cpp nodes, and how each policy serves traffic on a fleet.

`trace` reads requests and `traffic` makes them up; `fleets` says which machines there are and
`server` models one of them. `simulation` plays the requests through a front (`fronts`: the
gateway's own dispatcher, or another proxy), which knows what `knowledge` gives it. `comparison`
does that for several policies, `report` sums each up, and `bound` says how good any could be.
"""
