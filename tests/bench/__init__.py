"""Benchmarks: the data plane beside nginx and HAProxy, scheduling, and costs of single parts."""
