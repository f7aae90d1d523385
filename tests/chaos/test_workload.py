from __future__ import annotations

import json
import random

from tests.chaos.workload import emulated_request


def test_requests_follow_from_a_seed_and_no_two_prompts_are_the_same() -> None:
    first, second = random.Random(3), random.Random(3)
    requests = [emulated_request(first, seed=str(n)) for n in range(200)]
    assert requests == [emulated_request(second, seed=str(n)) for n in range(200)]
    prompts = {json.dumps({**request.body, "stream": None}, sort_keys=True) for request in requests}
    assert len(prompts) == 200
