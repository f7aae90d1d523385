"""Work that can wait: requests that are stored, run when there is room, and kept with results."""
