"""Configuration: the inventory (`config/nodes.yaml`) and the settings (`config/gateway.yaml`)."""
