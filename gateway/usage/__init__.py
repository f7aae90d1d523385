"""Limits, the ledger of requests, its reports, and what all of it cost."""
