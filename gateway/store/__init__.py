"""The store: keys, usage and the audit log in SQLite or PostgreSQL, behind one thread."""
