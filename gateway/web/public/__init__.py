"""The public listener: reading requests within limits, and sending what the relay yields."""
