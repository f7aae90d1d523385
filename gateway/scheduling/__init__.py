"""Scheduling: which node serves a request and when, within limits on waiting.

How a request goes through it:

1. `scheduler` takes the request. `fleet_sync` keeps the fleet as a table, a row for each node.
2. `candidates` finds the nodes that can serve it; in a fleet of two tiers `tier_router` asks
   `tier_policy` (and its `budget`) which of them are open to it.
3. `demand_model` makes it a `QueuedRequest`: tokens, prompts that nodes have cached, the session's
   node.
4. `dispatcher` places it on a row of `placement_state` (made of `node_slots`) that has room:
   `selection` chooses the row, by the expected `cost`. The scheduler returns the lease.
5. Without room, `admission` decides whether it may wait, by `forecast`'s predicted wait. It stands
   in `wait_queue`, and in `waiters` with its limits.
6. When a slot comes free, `matching` chooses the next: classes, fairness between callers, best fit.

`autoscaler` starts and stops standby nodes for what waits, as `autoscaling_policy` decides.
"""
