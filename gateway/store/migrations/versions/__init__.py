"""One module for each level of the store."""
