"""Configuration: the inventory (`config/nodes.yaml`) and the settings (`config/gateway.yaml`)."""

from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.node import NodeSpec
from gateway.config.settings import Settings, load_settings

__all__ = [
    "ConfigError",
    "Inventory",
    "NodeSpec",
    "Problem",
    "Settings",
    "load_inventory",
    "load_settings",
]
