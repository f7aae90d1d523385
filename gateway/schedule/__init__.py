"""Scheduling: which node serves a request and when, within limits on waiting.

How a request goes through it:

1. `scheduler` is asked for a lease.
2. `candidates` keeps the fleet as a table, a row for each node, and finds the nodes that can serve
   the request; in a fleet of two tiers `core.tiers` says which of them are open to it.
3. `core.demand_model` makes it a `QueuedRequest`: tokens, prompts that nodes have cached, the
   session's node.
4. `core.dispatcher` places it on a row of `core.placement_state` that has room: `core.selection`
   chooses the row by its expected cost. The scheduler returns the lease.
5. Without room, `admission` decides whether it may wait, by the predicted wait. It stands in
   `core.wait_queue`, and among the `Waiters` of `admission` with its limits.
6. When a slot comes free, `core.dispatcher` chooses the next: by class, fairness and fit.
7. `lease_service` is told how the attempt goes and ends, and what it took.

`core.batch_slots` has the rules of class `batch`; `autoscaler` starts and stops standby nodes for
what waits, as `core.autoscaling_policy` decides; `decision_log` keeps what was decided.
"""
