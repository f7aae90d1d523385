"""Plans a fleet before it is bought: how many of which nodes, at what wait and price.

`workload` is the traffic and `catalogue` the node types. `queueing` and `occupancy` give the first
estimate, `trial` plays the traffic through the real scheduler on simulated nodes, and `search`
finds the least number of nodes that meets a goal. `pricing` knows what fleets cost, `deployments`
compares ways to run them, `break_even` where GPUs are cheaper, and `running_fleet` asks what a
change of a fleet that runs would do. `answer` puts it together, `explanation` shows the arithmetic.
"""
