"""Planning: a model of llama.cpp nodes, and what a policy would make of a fleet and its traffic."""
