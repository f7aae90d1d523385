"""The types that a llama.cpp server can keep its KV cache in."""

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""What llama-server's `--cache-type-k` and `--cache-type-v` take."""
