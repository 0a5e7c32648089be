"""The workloads give every engine the same text."""

from __future__ import annotations

import hashlib

from octavo.bench.workloads import WORKLOADS


def test_prompts_are_those_of_the_load_generator() -> None:
    prompts = WORKLOADS["prefix"].prompts(3)
    # Of the project's load generator: --seed 3 -n 24 --words 30 --shared 900, prompts joined by newlines.
    assert (
        hashlib.sha256("\n".join(prompts).encode()).hexdigest()
        == "c888ad7f23db55975f52fb96528f5bb95d476dfcaede208539d311c1665baf27"
    )
    assert prompts[0].startswith("night parent team country ")


def test_sizes() -> None:
    for workload in WORKLOADS.values():
        prompts = workload.prompts(1)
        assert len(prompts) == workload.requests
        assert {len(prompt.split()) for prompt in prompts} == {workload.shared_words + workload.words}
        assert len(set(prompts)) == len(prompts)
        assert workload.prompts(1) == prompts
        assert workload.prompts(2) != prompts


def test_only_shared_words_are_shared() -> None:
    first, second = WORKLOADS["prefix"].prompts(1)[:2]
    assert first.split()[:900] == second.split()[:900]
    assert first.split()[900:] != second.split()[900:]
