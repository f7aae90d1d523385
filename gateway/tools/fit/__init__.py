"""How a model fits a machine: memory, context, quantisation, and the speed to expect."""
