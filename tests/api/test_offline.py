"""`LLM`: vLLM's offline interface, mostly on a tiny model with the numpy reference (cases O-01, O-02, O-18, O-20, O-21, O-27)."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from octavo.frontend.link import ChildLink

TINY = Path(__file__).parents[1] / "golden" / "tiny-llama"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = ["The quick brown fox", "a", "Octavo folds a sheet three times", "x y z"]


def tiny(**options: Any) -> LLM:
    return LLM(str(TINY), backend="numpy", kv_cache_memory="8M", **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny() as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[choice.text for choice in output.outputs] for output in outputs]


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_results_come_in_input_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (40, 1, 20, 3)]
    outputs = generate(llm, PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 1, 20, 3]
    alone = [generate(llm, [prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert token_ids(outputs) == token_ids(alone)
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_o27_preemption_does_not_change_answers() -> None:
    """Memory for a part of 8 requests, with logprobs, a stop string, a grammar and two choices among them; and one beyond all of it."""
    words = "Octavo folds a sheet three times, "
    prompts = [words[: 5 + 3 * index] for index in range(8)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=60 + index,
            logprobs=2 if index % 2 else None,
            ignore_eos=index != 4,
            stop=["e"] if index == 2 else None,
            n=2 if index == 3 else 1,
            structured_outputs=StructuredOutputsParams(regex="[a-f]{40,50}") if index == 4 else None,
        )
        for index in range(8)
    ]
    with LLM(str(TINY), backend="cpu", kv_cache_memory="2M", max_model_len=128) as roomy:
        alone = [generate(roomy, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with LLM(str(TINY), backend="cpu", kv_cache_memory="80K", max_model_len=128, max_num_seqs=8) as short:
        together = generate(short, prompts, params)
        with pytest.raises(ContextLengthError):
            generate(short, "x" * 200)
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert together[2].outputs[0].finish_reason == "stop"
    assert len(together[3].outputs) == 2
    assert set(together[4].outputs[0].text) <= set("abcdef")
    assert sum(output.metrics.num_preemptions for output in together if output.metrics) > 0
    assert all(output.metrics.num_preemptions == 0 for output in alone if output.metrics)


def test_prompts_in_all_forms_are_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    expected = token_ids(generate(llm, PROMPTS[0]))
    for prompt in (
        ids,
        tuple(ids),
        [ids],
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids, "cache_salt": "s"}],
        [PROMPTS[0]],
    ):
        [output] = generate(llm, prompt)
        assert token_ids([output]) == expected
        assert output.prompt_token_ids == ids


def test_no_prompts_no_results(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_without_parameters_the_defaults_hold(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], use_tqdm=False)
    assert len(output.outputs) == 1
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_default_sampling_params().max_tokens == 16


def test_preferences_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "top_p": 2.0, "eos_token_id": 2}')
    with LLM(str(folder), backend="numpy", kv_cache_memory="8M") as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    with LLM(str(folder), backend="numpy", kv_cache_memory="8M", generation_config="none") as made:
        assert made.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("count", [0, 3, 5])
def test_one_set_of_parameters_per_prompt_or_one_for_all(llm: LLM, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{count} sampling_params"):
        generate(llm, PROMPTS, [GREEDY] * count)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 0])
def test_other_things_are_no_parameters(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams"):
        llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("prompts", [5, None, iter(["a"])])
def test_other_things_are_no_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts must be"):
        llm.generate(prompts, use_tqdm=False)


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    [output] = generate(
        llm, PROMPTS[0], SamplingParams(temperature=1, seed=3, max_tokens=5, logprobs=3, prompt_logprobs=2)
    )
    [choice] = output.outputs
    assert isinstance(choice, CompletionOutput)
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 5
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token
        assert len(position) in (3, 4)
        ranks = sorted(entry.rank for entry in position.values() if entry.rank is not None)
        assert ranks[:3] == [1, 2, 3]
        by_rank = sorted(position.values(), key=lambda entry: entry.rank or 0)
        assert [entry.logprob for entry in by_rank] == sorted((entry.logprob for entry in by_rank), reverse=True)
        assert position[token].decoded_token == llm.get_tokenizer().token_text(token)
    assert choice.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, prompt_position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert prompt_position is not None
        assert token in prompt_position


def test_zero_logprobs_are_the_token_alone(llm: LLM) -> None:
    [output] = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=2, logprobs=0))
    assert output.outputs[0].logprobs is not None
    assert [list(position) for position in output.outputs[0].logprobs] == [[t] for t in output.outputs[0].token_ids]


def test_o18_choices_of_several_prompts(llm: LLM) -> None:
    outputs = generate(llm, PROMPTS[:3], SamplingParams(n=2, seed=5, max_tokens=8))
    assert [[choice.index for choice in output.outputs] for output in outputs] == [[0, 1]] * 3
    assert all(output.outputs[0].token_ids != output.outputs[1].token_ids for output in outputs)


def test_o18_one_bad_prompt_refuses_all_before_any_work(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        generate(llm, ["fine", [1] * 5000, "fine"])
    with pytest.raises(InvalidRequestError):
        generate(llm, ["fine", ""])
    with pytest.raises(InvalidRequestError):
        generate(llm, [[1, 10**6]])
    with pytest.raises(InvalidRequestError, match="promt"):
        generate(llm, {"promt": "x"})
    assert len(llm._streams) == 0


def test_o21_seeds_repeat_alone_and_in_company(llm: LLM) -> None:
    seeded = SamplingParams(n=3, seed=7, temperature=1, max_tokens=8)
    alone = token_ids(generate(llm, PROMPTS[0], seeded))
    unseeded = SamplingParams(temperature=1, max_tokens=8)
    together = generate(llm, [PROMPTS[0], *PROMPTS], [seeded, *[unseeded] * 4])
    assert token_ids(together[:1]) == alone
    assert len({tuple(choice) for choice in alone[0]}) == 3


def test_the_models_seed_repeats_requests_without_one() -> None:
    params = SamplingParams(temperature=1, max_tokens=8)
    runs = []
    for seed in (1, 1, 2):
        with tiny(seed=seed) as made:
            runs.append(token_ids(generate(made, PROMPTS, params)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_prefix_cache_is_counted_and_reset(llm: LLM) -> None:
    prompt = list(range(3, 67))
    llm.reset_prefix_cache()
    cached = [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache()
    cached.append(generate(llm, prompt)[0].num_cached_tokens)
    assert cached == [0, 63, 0]


def test_beam_search_finds_what_greedy_decoding_misses(llm: LLM) -> None:
    greedy = generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True))
    one = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    for single, output in zip(one, greedy, strict=True):
        (beam,) = single.sequences
        assert beam.tokens == [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert beam.cum_logprob == pytest.approx(output.outputs[0].cumulative_logprob)
        assert beam.text == llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=True)
    wide = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True), concurrency_limit=3)
    assert all(len(output.sequences) == 4 for output in wide)
    totals = [[beam.cum_logprob for beam in output.sequences] for output in wide]
    assert all(total == sorted(total, reverse=True) for total in totals)
    assert sum(total[0] for total in totals) > sum(output.outputs[0].cumulative_logprob or 0 for output in greedy)
    # The same alone, and as ids.
    (alone,) = llm.beam_search(
        {"prompt_token_ids": greedy[1].prompt_token_ids}, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    )
    assert [beam.tokens for beam in alone.sequences] == [beam.tokens for beam in wide[1].sequences]
    with pytest.raises(InvalidRequestError) as refused:
        llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=2))
    assert refused.value.param == "logprobs"


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    outputs = [
        *llm.chat(conversation, GREEDY, use_tqdm=False),
        *llm.chat([conversation, conversation], GREEDY, use_tqdm=False),
    ]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert "Hello" in (outputs[0].prompt or "")
    continued = [*conversation, {"role": "assistant", "content": "Hi th"}]
    [output] = llm.chat(continued, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert (output.prompt or "").endswith("Hi th")


def test_o20_min_tokens_and_max_tokens(llm: LLM) -> None:
    eos = 2
    forced = {"temperature": 0, "logit_bias": {eos: 100.0}}
    [at_once] = generate(llm, PROMPTS[0], SamplingParams(max_tokens=9, **forced))
    assert (at_once.outputs[0].token_ids, at_once.outputs[0].finish_reason) == ([eos], "stop")
    [later] = generate(llm, PROMPTS[0], SamplingParams(max_tokens=9, min_tokens=4, **forced))
    assert len(later.outputs[0].token_ids) == 5
    assert later.outputs[0].token_ids.index(eos) == 4
    [never] = generate(llm, PROMPTS[0], SamplingParams(max_tokens=4, min_tokens=4, **forced))
    assert eos not in never.outputs[0].token_ids
    assert never.outputs[0].finish_reason == "length"


def test_more_prompts_than_any_queue_limit(llm: LLM) -> None:
    outputs = generate(llm, [[1, 2, 3 + i % 50] for i in range(1200)], SamplingParams(temperature=0, max_tokens=1))
    assert len(outputs) == 1200
    assert token_ids(outputs[:50]) == token_ids(outputs[50:100])


def test_ctrl_c_cancels_and_leaves_a_working_model(llm: LLM) -> None:
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            generate(llm, PROMPTS * 8, SamplingParams(max_tokens=200, ignore_eos=True))
    timer.join()
    assert len(llm._streams) == 0
    assert generate(llm, PROMPTS[0])[0].finished


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert "tok/s" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"block_size": 7}, "7"),
        ({"max_num_seqs": "many"}, "int"),
        ({"scheduling_policy": "random"}, "random"),
        ({"decode_timeout": -1.0}, "decode-timeout"),
        ({"priority_ageing": 5.0}, "scheduling-policy priority"),
        ({"max_long_partial_prefills": 0}, "max-long-partial-prefills"),
        ({"num_scheduler_steps": 0}, "num-scheduler-steps"),
        ({"num_scheduler_steps": 65}, "num-scheduler-steps"),
        ({"max_model_len": 10**6}, "max-model-len"),
        ({"dtype": "int3"}, "int3"),
        ({"gpu_memory_utilization": 1.5, "kv_cache_memory": None}, "gpu-memory-utilization"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(TINY), **{"backend": "numpy", **options})


@pytest.mark.parametrize("num_scheduler_steps", [1, 3, 8, 64])
def test_steps_at_once_do_not_change_answers(llm: LLM, num_scheduler_steps: int) -> None:
    """Ends by length, by a stop string inside of what comes at once, and by a stop id; logprobs and a grammar beside them."""

    def story(output: CompletionOutput) -> tuple[object, ...]:
        return output.token_ids, output.text, output.finish_reason, output.stop_reason

    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=37, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(
            temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["folds", "a sheet"])
        ),
    ]
    (free,) = generate(llm, PROMPTS[2], params[2])
    tokens, text = free.outputs[0].token_ids, free.outputs[0].text
    stopped = [
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[tokens[9]]),
        SamplingParams(temperature=0, max_tokens=20, stop=[text[len(text) // 2 :][:3]]),
    ]
    prompts, params = [*PROMPTS, PROMPTS[2], PROMPTS[2]], [*params, *stopped]
    expected = [generate(llm, prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]
    assert expected[4].finish_reason == expected[5].finish_reason == "stop"
    with tiny(num_scheduler_steps=num_scheduler_steps) as made:
        for together in (
            generate(made, prompts, params),
            [generate(made, *pair)[0] for pair in zip(prompts, params, strict=True)],
        ):
            assert [story(output.outputs[0]) for output in together] == list(map(story, expected))


def test_priorities_of_a_batch(llm: LLM) -> None:
    with tiny(scheduling_policy="priority", max_num_seqs=1) as made:
        outputs = made.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[3, 1, 2, 0])
        assert token_ids(outputs) == token_ids(generate(made, PROMPTS))
        began = [output.metrics.scheduled_s for output in outputs if output.metrics is not None]
        assert sorted(began[1:]) == [began[3], began[1], began[2]]  # the first may start before the others are there
        for wrong in ([1], "abcd", [1, 2, 3, 0.5]):
            with pytest.raises(InvalidRequestError, match="priority"):
                made.generate(PROMPTS, GREEDY, use_tqdm=False, priority=wrong)
    with pytest.raises(InvalidRequestError, match="scheduling-policy"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, priority=[1])


def test_a_closed_model_says_so() -> None:
    made = tiny()
    made.close()
    made.close()
    for use in (lambda: generate(made, "x"), made.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_a_dead_child_is_seen() -> None:
    with tiny(engine_process=True) as made:
        assert isinstance(made._link, ChildLink)
        timer = threading.Timer(0.2, os.kill, (made._link.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(EngineDeadError, match="signal 9"):
            while True:
                generate(made, PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        timer.join()
        with pytest.raises(EngineDeadError):
            generate(made, PROMPTS)


@pytest.fixture(scope="module")
def native(smollm2: Path) -> Iterator[LLM]:
    """The default model on the native backend, with a small pool."""
    with LLM(str(smollm2), max_model_len=512, kv_cache_memory="32M", max_num_seqs=8) as made:
        yield made


def test_a_real_model_answers(native: LLM) -> None:
    [output] = generate(native, "The capital of France is")
    assert output.outputs[0].text.startswith(" Paris")
    [output] = native.chat([{"role": "user", "content": "Name a colour."}], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids[0] == native.get_tokenizer().special_tokens["<|im_start|>"]


def test_in_process_and_child_engine_give_equal_bits(native: LLM, smollm2: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=5, prompt_logprobs=1, n=2)
    with LLM(str(smollm2), max_model_len=512, kv_cache_memory="32M", max_num_seqs=3, engine_process=True) as child:
        here, there = generate(native, PROMPTS, params), generate(child, PROMPTS, params)
    for one, other in zip(here, there, strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_o20_min_tokens_hold_for_every_end_token(native: LLM) -> None:
    for eos in native._model.eos_token_ids:
        forced = SamplingParams(temperature=0, logit_bias={eos: 100.0}, min_tokens=4, max_tokens=9)
        [output] = generate(native, PROMPTS[0], forced)
        assert output.outputs[0].token_ids.index(eos) == 4
        assert output.outputs[0].finish_reason == "stop"


def test_stop_strings_and_bad_words(native: LLM) -> None:
    prompt = "Count: one, two, three,"
    free = generate(native, prompt, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    stop = free[10:14]
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=20, stop=[stop], include_stop_str_in_output=include)
        [choice] = generate(native, prompt, params)[0].outputs
        assert choice.text == free[: free.index(stop) + (len(stop) if include else 0)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert " four" in free
    [output] = generate(native, prompt, SamplingParams(temperature=0, max_tokens=20, bad_words=["four"]))
    assert " four" not in output.outputs[0].text
