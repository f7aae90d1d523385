"""The OpenAPI document of both listeners."""
