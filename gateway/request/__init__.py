"""From a body to a `Request`: its route, what is checked, measured and edited, its prompt key."""
