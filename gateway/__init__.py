"""An OpenAI-compatible gateway in front of many llama.cpp servers."""

__version__ = "0.1.0"
