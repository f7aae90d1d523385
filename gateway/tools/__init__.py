"""What stands beside the way of a request: commands, simulator, local servers, tuning."""
