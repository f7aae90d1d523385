"""The commands of the workshop: what a fleet would do, takes and costs, measured or simulated."""
