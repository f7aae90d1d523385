"""The fleet in a terminal: nodes, queue and requests, live."""
