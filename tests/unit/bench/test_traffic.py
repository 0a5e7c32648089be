"""Traffic is said by names and lengths: equal names are equal words, and files say the same as flags."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from octavo.bench import traffic
from octavo.bench.traffic import Job, Traffic
from octavo.bench.workloads import WORDS, WORKLOADS
from octavo.errors import ConfigError


def test_equal_names_are_equal_words_and_shorter_parts_their_beginning() -> None:
    long = Job(prompt=(("system", 101), ("a", 7)), output_tokens=1)
    short = Job(prompt=(("system", 50),), output_tokens=1)
    made = Traffic(name="t", jobs=(long, short), seed=3)
    words = made.word_indices(long)
    assert len(words) == long.num_words == 108
    assert made.word_indices(short) == words[:50]
    assert made.text(long).split() == [WORDS[index] for index in words]
    assert len(set(words)) > 40
    other = Traffic(name="t", jobs=(long,), seed=4)
    assert other.word_indices(long)[:20] != words[:20]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_race_workloads_have_the_lengths_of_their_texts(name: str) -> None:
    made, workload = traffic.race(name, seed=1), WORKLOADS[name]
    assert len(made.jobs) == workload.requests
    assert made.max_concurrency == workload.concurrency
    for job, prompt in zip(made.jobs, workload.prompts(1), strict=True):
        assert job.num_words == len(prompt.split())
        assert job.output_tokens == workload.output
    texts = [made.text(job) for job in made.jobs]
    assert len(set(texts)) == len(texts)
    shared = workload.shared_words
    assert len({tuple(text.split()[:shared]) for text in texts}) == 1
    assert len({tuple(text.split()[shared : shared + 20]) for text in texts}) == len(texts)


def test_random_lengths_vary_within_the_ratio() -> None:
    made = traffic.random_lengths(200, input_len=100, output_len=10, range_ratio=0.5, prefix_len=30, seed=1)
    lengths = [job.num_words - 30 for job in made.jobs]
    assert (min(lengths), max(lengths)) != (100, 100)
    assert min(lengths) >= 50 and max(lengths) <= 150
    assert {made.text(job).split()[29] for job in made.jobs} == {made.text(made.jobs[0]).split()[29]}
    assert {job.num_words for job in traffic.random_lengths(5, input_len=9, output_len=1).jobs} == {9}


def test_repeated_prefixes_are_shared_evenly() -> None:
    made = traffic.repeated_prefixes(12, prefix_len=8, suffix_len=4, num_prefixes=3, output_len=2, seed=5)
    names = [job.prompt[0][0] for job in made.jobs]
    assert {names.count(name) for name in names} == {4}
    assert names != sorted(names)


def test_chats_resend_what_was_said() -> None:
    made = traffic.chats(40, seed=2)
    assert len(made.jobs) == 40
    for before, after in zip(made.jobs, made.jobs[1:], strict=False):
        if before.session == after.session:
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert after.prompt[len(before.prompt)][1] == before.output_tokens


def test_poisson_arrivals() -> None:
    made = traffic.arriving(traffic.random_lengths(2000, input_len=1, output_len=1, seed=1), 50.0)
    gaps = [b.at_s - a.at_s for a, b in zip(made.jobs, made.jobs[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # an exponential distribution's is its mean
    even = traffic.arriving(traffic.random_lengths(500, input_len=1, output_len=1, seed=1), 50.0, burstiness=100.0)
    gaps = [b.at_s - a.at_s for a, b in zip(even.jobs, even.jobs[1:], strict=False)]
    assert statistics.stdev(gaps) < 0.3 / 50
    sessions = traffic.arriving(traffic.chats(20, seed=1), 1.0)
    follow = [job for job in sessions.jobs if job.think_s]
    assert follow and all(job.at_s == 0 for job in follow)


def test_traces_come_back(tmp_path: Path) -> None:
    made = traffic.arriving(traffic.chats(10, seed=1), 2.0)
    traffic.write_trace(made, tmp_path / "t.jsonl")
    again = traffic.read_trace(tmp_path / "t.jsonl", seed=1)
    assert sorted(again.jobs, key=str) == sorted(made.jobs, key=str)
    assert again.text(again.jobs[0]) in {made.text(job) for job in made.jobs}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"output_tokens": 1, "prompt": [["a", 1]], "prio": 1}', "line 2.*prio"),
        ('{"output_tokens": 0, "prompt": [["a", 1]]}', "request 2.*output_tokens"),
        ('{"output_tokens": 1}', "request 2.*parts or text"),
        ('{"output_tokens": 1, "prompt": [["a", 1]], "text": "b"}', "request 2.*parts or text"),
        ('{"output_tokens": 1, "prompt": [["a", -1], ["b", 3]]}', "request 2"),
        ('{"output_tokens": 1, "prompt": [["a", 1]], "think_s": -1}', "request 2.*think_s"),
    ],
)
def test_wrong_traces_are_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"output_tokens": 1, "prompt": [["a", 1]]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        traffic.read_trace(path)


def test_files_of_text(tmp_path: Path) -> None:
    custom = tmp_path / "c.jsonl"
    custom.write_text(
        '{"prompt": "one two"}\n\n{"prompt": "three", "output_tokens": 5, "more": 1}\n{"prompt": "four"}\n'
    )
    made = traffic.read_custom(custom, 2, 9)
    assert [(made.text(job), job.output_tokens) for job in made.jobs] == [("one two", 9), ("three", 5)]
    with pytest.raises(ConfigError, match="literal text"):
        made.word_indices(made.jobs[0])
    talks = [
        {"conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "word " * 10}]}
        for n in range(5)
    ]
    talks += [{"conversations": [{"from": "human", "value": "alone"}]}, {"id": "nothing"}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(talks))
    made = traffic.read_sharegpt(path, 3, None, seed=1)
    assert len(made.jobs) == 3 and {job.output_tokens for job in made.jobs} == {13}
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="ShareGPT"):
        traffic.read_sharegpt(path, 3, None)
