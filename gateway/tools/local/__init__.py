"""`embedded` and `memory` under their old names."""
