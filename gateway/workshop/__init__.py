"""Tools beside the gateway: benchmark, plan, simulator, tuning and the fit to given hardware."""
