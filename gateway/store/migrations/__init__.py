"""Alembic's migrations of the store, which the program runs itself."""
