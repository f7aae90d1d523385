"""Work that can wait: batches, responses in the background, the files of both, and webhooks."""
