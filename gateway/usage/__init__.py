"""What callers use and may use: live limits, the ledger of requests, and what they cost."""
