"""Work that can wait: callers' files, and in them the requests and results of batches."""
