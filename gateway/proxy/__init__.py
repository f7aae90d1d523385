"""From a request to an answer: body edits, attempts, retries, SSE and its dialects."""
