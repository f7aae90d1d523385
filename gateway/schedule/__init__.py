"""Scheduling: which node serves a request and when, within limits on waiting.

The words:

- A *row* is a node as the scheduler sees it: its slots, speeds and what runs there, in numbers.
- The *candidates* of a request are the rows that could serve it, however busy they are.
- A *tier* is the CPU or the GPU nodes; rules and a budget say which are open to a request.
- The *demand* of a request is what it is expected to take: tokens of its prompt, those of them that
  a row has cached, and tokens of its answer.
- Its *finish* on a row is the expected cost of placing it there, in seconds: its own time and that
  by which it holds up what runs there. The row of the least finish gets it.
- A request with slots on a row is a *placement*; the *lease* is what its sender is given for it.

How a request goes through it (read `core.requests` first: what a request, a row and a candidate set
are in numbers):

1. `scheduler` is asked for a lease.
2. `candidates` keeps the fleet as a table, a row for each node, and finds the nodes that can serve
   the request; in a fleet of two tiers `core.tiers` says which of them are open to it.
3. `core.demand_model` makes it a `QueuedRequest`: tokens, prompts that nodes have cached, the
   session's node.
4. `core.dispatcher` places it on a row of the `PlacementState` that has room: `core.selection`
   chooses the row by its expected cost. The scheduler returns the lease.
5. Without room, `admission` decides whether it may wait, by the predicted wait. It stands in
   `core.wait_queue`, and among the `Waiters` of `admission` with its limits.
6. When a slot comes free, `core.dispatcher` chooses the next: by class, fairness and fit.
7. `lease_service` is told how the attempt goes and ends, and what it took.

`core.batch_slots` has the rules of class `batch`; `autoscaler` starts and stops standby nodes for
what waits, as `core.autoscaling_policy` decides; `decision_log` keeps what was decided.
"""
