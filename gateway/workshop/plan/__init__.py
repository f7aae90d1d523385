"""Plans a fleet before it is bought: how many of which nodes, at what wait and price.

`catalogue` has the node types with their prices. `search` finds the least number of equal nodes
that meets a goal for some traffic: by a first estimate, then by trials on simulated nodes.
`answer` compares types, ways to deploy them, and where GPUs are cheaper; `running_fleet` asks what
a change of a fleet that runs would do.
"""
