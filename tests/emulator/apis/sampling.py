"""Some of the four dozen sampling settings of `/props` and of the end of a native answer."""

from __future__ import annotations

from typing import Any

SAMPLING: dict[str, Any] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "stop": [],
    "max_tokens": -1,
    "n_predict": -1,
    "ignore_eos": False,
    "stream": False,
    "grammar": "",
    "samplers": ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
}
