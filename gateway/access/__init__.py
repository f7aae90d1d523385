"""Who may do what: keys, callers and their classes, and where the listeners may stand."""
