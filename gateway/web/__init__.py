"""The HTTP edge: a public listener for clients, an admin listener for operators."""
