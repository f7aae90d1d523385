"""Scheduling: which node serves a request and when, within limits on waiting.

How a request goes through it:

1. `lease_service` is asked for a lease, and told how it ended. `scheduler` takes the request.
2. `candidates` keeps the fleet as a table, a row for each node, and finds the nodes that can serve
   the request; in a fleet of two tiers `tiers` says which of them are open to it.
3. `demand_model` makes it a `QueuedRequest`: tokens, prompts that nodes have cached, the session's
   node.
4. `dispatcher` places it on a row of `placement_state` that has room: `selection` chooses the row
   by its expected cost. The scheduler returns the lease.
5. Without room, `admission` decides whether it may wait, by the predicted wait. It stands in
   `wait_queue`, and among the `Waiters` with its limits.
6. When a slot comes free, `dispatcher` chooses the next: by class, fairness and fit.

`batch_slots` has the rules of class `batch`; `autoscaler` starts and stops standby nodes for what
waits, as `autoscaling_policy` decides; `decision_log` keeps what was decided.
"""
