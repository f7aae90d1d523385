"""The data-plane benchmark: what a request and a chunk cost beside nginx and HAProxy."""
