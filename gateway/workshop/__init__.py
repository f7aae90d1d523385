"""Tools beside the gateway: commands, simulator, local servers, tuning."""
