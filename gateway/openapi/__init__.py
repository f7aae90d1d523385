"""The OpenAPI document of both listeners, and the tables of the HTTP reference made from it."""
