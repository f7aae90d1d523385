"""The two pictures with which README begins, each drawn from recorded figures."""
