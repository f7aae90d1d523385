"""The public listener's paths: one handler for those that reach nodes, Starlette for all others."""
